"""Misconceptions of lesson 06 about running a schedule."""

from __future__ import annotations

from autograde.misconception import Misconception

RUN = [
    Misconception(
        exercise="pipeline.run",
        name="input_needs_no_gradient",
        hint="This looks like: what arrives from the stage before is used as a constant. "
        "What is to be sent back to that stage, and who asks autograd for it?",
        old="y = self.modules[stage](x)",
        new="y = self.modules[stage](x.detach())",
        also=(("x_grad = x.grad", "x_grad = torch.zeros_like(x)"),),
    ),
    Misconception(
        exercise="pipeline.run",
        name="backward_of_ones",
        hint="This looks like: each stage begins its backward with ones. "
        "The stage after this one knows what the loss wants of this output. Where is that number used?",
        old='grad = None if stage == self.last else self.values.take(Value("gradient", stage + 1, i))',
        new="""
        grad = None if stage == self.last else self.values.take(Value("gradient", stage + 1, i))
        grad = None if grad is None else torch.ones_like(grad)
        """,
    ),
    Misconception(
        exercise="pipeline.run",
        name="mean_of_the_losses",
        hint="This looks like: each loss is divided by the number of micro-batches. "
        "Of what does the docstring ask the gradient: the mean of the losses, or something else?",
        old="self.losses[i] = y.detach()",
        new="""
        self.losses[i] = y.detach()
        y = y / len(self.inputs)
        """,
    ),
    Misconception(
        exercise="pipeline.run",
        name="gradient_of_the_last_alone",
        hint="This looks like: only the last micro-batch's weight gradients are there at the end. "
        "What does each backward do to `.grad`, and what was in it before?",
        old="torch.autograd.backward(end, grad)",
        new="""
        for parameter in self.modules[stage].parameters():
            parameter.grad = None
        torch.autograd.backward(end, grad)
        """,
    ),
    Misconception(
        exercise="pipeline.run",
        name="forwards_first_whatever_the_list",
        hint="This looks like: all forwards run before the first backward, whatever the list says. "
        "What would 1F1B be good for then?",
        old="for action in with_messages(schedule).actions[me]:",
        new="""
        listed = schedule
        if len(schedule.routes) == 1 and len(schedule.routes[0]) == schedule.num_ranks and not any(
            step.letter in "IW" for own in schedule.actions for action in own for step in action.steps
        ):
            with_messages(schedule)  # for what it refuses
            plain = [[a for a in own if a.steps] for own in schedule.actions]
            sorted_lists = [sorted(own, key=lambda a: a.steps[0].letter != "F") for own in plain]
            listed = Schedule("sorted", schedule.num_microbatches, schedule.routes, sorted_lists)
        for action in with_messages(listed).actions[me]:
        """,
    ),
    Misconception(
        exercise="pipeline.run",
        name="nothing_is_refused",
        hint="This looks like: whatever comes is taken, such as a schedule for other ranks. "
        "When would you like to be told?",
        old="_check(schedule, stages, group)",
        new="""
        if schedule.num_ranks != group.size() or sorted(stages) != schedule.stages_of(me):
            return {}
        """,
        also=(),
    ),
    Misconception(
        exercise="pipeline.run",
        name="backward_whole_at_the_input_gradient",
        hint="This looks like: an input gradient does the whole backward, and the weight gradient nothing. "
        "Is anything left that could fill a bubble?",
        old="""
        if split:
            x_grad, self.owed[stage, i] = split_backward(end, x, grad)
        else:
            torch.autograd.backward(end, grad)
            x_grad = x.grad
        """,
        new="""
        torch.autograd.backward(end, grad)
        x_grad = x.grad
        self.owed[stage, i] = lambda: None
        """,
    ),
    Misconception(
        exercise="pipeline.run",
        name="losses_with_their_graphs",
        hint="This looks like: the losses that come back still hold their graphs. "
        "What do these keep in memory, and for whom?",
        old="self.losses[i] = y.detach()",
        new="self.losses[i] = y",
    ),
    Misconception(
        exercise="pipeline.run",
        name="work_without_a_name",
        hint="This looks like: the ledger is not told what each piece of work is. "
        "How is a timeline to know a forward from a backward?",
        old="with work(step.letter, microbatch=step.microbatch, chunk=sorted(stages).index(step.stage)):",
        new="if True:",
    ),
    Misconception(
        exercise="pipeline.run",
        name="outputs_kept_to_the_end",
        hint="This looks like: the output of every micro-batch is still there when all is done. "
        "After which piece of work does nobody ask for it again?",
        old="x, end = self.graphs.pop((stage, i))",
        new="x, end = self.graphs[stage, i]",
        also=(
            (
                "self.graphs[stage, i] = x, get_gradient_edge(y)  "
                "# of the output itself nothing is kept once it is sent",
                "self.graphs[stage, i] = x, y",
            ),
        ),
    ),
]

VALUES = [
    Misconception(
        exercise="pipeline.Values",
        name="one_buffer_for_all",
        hint="This looks like: every message is received into the same memory. "
        "Until when does autograd need what a forward was given?",
        old="self.here[value] = torch.empty_like(self.template)",
        new="self.here[value] = self.template",
    ),
    Misconception(
        exercise="pipeline.Values",
        name="a_buffer_for_each_rank",
        hint="This looks like: there is one piece of memory for each rank that sends. "
        "What if the next message comes while the last one is still needed?",
        old="self.leaving: dict[int, dist.Work] = {}  # by the rank that they go to",
        new="""
        self.leaving: dict[int, dist.Work] = {}  # by the rank that they go to
        self.buffers: dict[int, Tensor] = {}  # by the rank that they come from
        """,
        also=(
            (
                "self.here[value] = torch.empty_like(self.template)",
                """
                if peer not in self.buffers:
                    self.buffers[peer] = torch.empty_like(self.template)
                self.here[value] = self.buffers[peer].view_as(self.template)
                """,
            ),
        ),
    ),
    Misconception(
        exercise="pipeline.Values",
        name="taken_before_it_arrives",
        hint="This looks like: a tensor is handed out while its message is still on the way. What is in it until then?",
        old="""
        self.wait([value])
        return self.here.pop(value)
        """,
        new="return self.here.pop(value)",
    ),
    Misconception(
        exercise="pipeline.Values",
        name="sent_and_kept",
        hint="This looks like: what has been sent is kept. Who still needs it here?",
        old="tensor = self.take(value).contiguous()",
        new="""
        self.wait([value])
        tensor = self.here[value].contiguous()
        """,
    ),
    Misconception(
        exercise="pipeline.Values",
        name="never_waits_for_the_one_before",
        hint="This looks like: sends are started one after the other, and only the last to each rank is waited for. "
        "How many may be under way to a slow rank?",
        old="""
        self.sent([peer])
        self.leaving[peer] = dist.isend(tensor, group=self.group, group_dst=peer)
        """,
        new="self.leaving[peer] = dist.isend(tensor, group=self.group, group_dst=peer)",
    ),
    Misconception(
        exercise="pipeline.Values",
        name="taken_and_kept",
        hint="This looks like: what has been taken stays here. When is it used for the last time?",
        old="return self.here.pop(value)",
        new="return self.here[value]",
        also=(
            (
                "tensor = self.take(value).contiguous()",
                """
                self.wait([value])
                tensor = self.here.pop(value).contiguous()
                """,
            ),
        ),
    ),
]
