"""Misconceptions of lesson 07 about the order of messages, and about copies of a weight."""

from __future__ import annotations

from autograde.misconception import Misconception

ORDER_MESSAGES = [
    Misconception(
        exercise="pipeline.order_messages",
        name="each_rank_for_itself",
        hint="This looks like: each rank receives when it needs a value and sends when it has made one, "
        "without a look at its neighbours. If both send first, who receives?",
        source="""
        def order_messages(schedule: Schedule) -> Schedule:
            '''Put every send and receive into the lists, so that blocking sends never deadlock, on 2 ranks as on many.

            schedule: lists of computation only.
            Returns a Schedule with the same computation in the same order on each rank, and for each value that
            another rank needs one Send after the action that makes it and one Receive before the action that needs
            it. From each rank to each other rank sends and receives come in the same order, and where a send blocks
            until its receive is reached all ranks still come to their ends.
            Raises ValueError where the schedule cannot reach its end.
            '''
            validate(schedule)
            lists = []
            for rank, actions in enumerate(schedule.actions):
                mine = []
                for action in actions:
                    for value in [value for step in action.steps for value in schedule.needs(step)]:
                        source = schedule.rank_of(value.stage, value.microbatch)
                        if source != rank:
                            mine.append(Receive(value, source))
                    mine.append(action)
                    for value in filter(None, map(schedule.makes, action.steps)):
                        peer = schedule.receiver(value)
                        if peer is not None:
                            mine.append(Send(value, peer))
                lists.append(mine)
            return Schedule(schedule.name, schedule.num_microbatches, schedule.routes, lists)
        """,
    ),
    Misconception(
        exercise="pipeline.order_messages",
        name="no_gradients",
        hint="This looks like: activations are sent, and gradients are not. What does the stage before wait for?",
        old="if peer is not None:",
        new='if peer is not None and value.kind == "activation":',
    ),
    Misconception(
        exercise="pipeline.order_messages",
        name="receives_in_reverse",
        hint="This looks like: a receive is put in front of those that were there before. "
        "Which of two messages does the other rank send first?",
        old="lists[peer].append(Receive(value, rank))",
        new="lists[peer].insert(0, Receive(value, rank))",
    ),
    Misconception(
        exercise="pipeline.order_messages",
        name="all_sends_at_the_end",
        hint="This looks like: messages are sent when all work of a rank is done. "
        "What does the next rank do until then?",
        old="return Schedule(schedule.name, schedule.num_microbatches, schedule.routes, lists)",
        new="""
        lists = [sorted(own, key=lambda action: isinstance(action, Send)) for own in lists]
        return Schedule(schedule.name, schedule.num_microbatches, schedule.routes, lists)
        """,
    ),
    Misconception(
        exercise="pipeline.order_messages",
        name="stuck_and_silent",
        hint="This looks like: a schedule that cannot end comes back with the rest of its actions missing. "
        "Who would notice, and when?",
        old="if done != [len(actions) for actions in schedule.actions]:",
        new="if False:",
    ),
]

SUM_COPIES = [
    Misconception(
        exercise="pipeline.sum_copies",
        name="mean_of_both",
        hint="This looks like: the two gradients are averaged. "
        "One weight is used in two places of one loss: is its gradient the mean of both uses?",
        old="totals = (mine + other).split([p.numel() for p in parameters])",
        new="totals = ((mine + other) / 2).split([p.numel() for p in parameters])",
    ),
    Misconception(
        exercise="pipeline.sum_copies",
        name="exchanged_not_added",
        hint="This looks like: each rank takes the other's gradient in the place of its own. "
        "Do the two copies of the weight stay equal?",
        old="totals = (mine + other).split([p.numel() for p in parameters])",
        new="totals = other.split([p.numel() for p in parameters])",
    ),
    Misconception(
        exercise="pipeline.sum_copies",
        name="tied_alone",
        hint="This looks like: only the tied weight is added up. "
        "In DualPipe two ranks hold every stage: what has each of them seen of the batch?",
        old="at = {stage} if parameter is not tied else {0, last}",
        new="at = set() if parameter is not tied else {0, last}",
    ),
    Misconception(
        exercise="pipeline.sum_copies",
        name="stages_alone",
        hint="This looks like: the tied weight counts as any other parameter of its stage. Who else holds it?",
        old="at = {stage} if parameter is not tied else {0, last}",
        new="at = {stage}",
    ),
    Misconception(
        exercise="pipeline.sum_copies",
        name="a_message_a_parameter",
        hint="This looks like: every parameter goes in a message of its own. "
        "What does each message cost, however small it is?",
        old="_add_that_of(peer, list(parameters), group)",
        new="""
        for parameter in parameters:
            _add_that_of(peer, [parameter], group)
        """,
    ),
    Misconception(
        exercise="pipeline.sum_copies",
        name="one_side_adds",
        hint="This looks like: one of the two ranks has the whole gradient, and the other has its part. "
        "What happens to the two copies in the optimizer's step?",
        old="parameter.grad = total.view_as(parameter)",
        new="""
        if group.rank() < peer:
            parameter.grad = total.view_as(parameter)
        """,
    ),
]
