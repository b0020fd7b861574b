"""Misconceptions of lesson 04: a region's random numbers."""

from __future__ import annotations

from autograde.misconception import Misconception

REGION_RNG = [
    Misconception(
        exercise="sequence.region_rng",
        name="same_everywhere",
        hint="This looks like: all ranks draw the same numbers, also where they hold different tokens. "
        "Then token 0 and the first token of the next rank lose the same features, always. What could tell the ranks "
        "apart?",
        old="torch.manual_seed(seed + group.rank() if split else seed)",
        new="torch.manual_seed(seed)",
    ),
    Misconception(
        exercise="sequence.region_rng",
        name="different_everywhere",
        hint="This looks like: every rank draws numbers of its own, also where all hold the same values. "
        "What becomes of copies that are to be equal, when each drops something else?",
        old="torch.manual_seed(seed + group.rank() if split else seed)",
        new="torch.manual_seed(seed + group.rank())",
    ),
    Misconception(
        exercise="sequence.region_rng",
        name="one_fixed_seed",
        hint="This looks like: the seed is the same at every call, so each region, and each step of training, drops "
        "the same elements. From what could a seed follow that is new each time, and equal on all ranks?",
        old="seed = int(torch.randint(2**62, ()))",
        new="seed = 1234",
    ),
    Misconception(
        exercise="sequence.region_rng",
        name="seed_taken_back",
        hint="This looks like: the seed is drawn, and then the state from before is put back, so the next region draws "
        "the same one. What may the outside notice of a region, and what must it notice?",
        old="""
        seed = int(torch.randint(2**62, ()))
        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(seed + group.rank() if split else seed)
        """,
        new="""
        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        with torch.random.fork_rng(devices):
            seed = int(torch.randint(2**62, ()))
            torch.manual_seed(seed + group.rank() if split else seed)
        """,
    ),
    Misconception(
        exercise="sequence.region_rng",
        name="state_not_put_back",
        hint="This looks like: after the region, torch goes on with the region's numbers. "
        "They are unlike on the ranks. What happens at the next place where all have to draw the same?",
        old="""
        with torch.random.fork_rng(devices):
            torch.manual_seed(seed + group.rank() if split else seed)
            yield
        """,
        new="""
        torch.manual_seed(seed + group.rank() if split else seed)
        yield
        """,
    ),
    Misconception(
        exercise="sequence.region_rng",
        name="not_put_back_after_an_error",
        hint="This looks like: the state is put back at the end, unless something goes wrong inside. "
        "Which of your lines is still reached when the region raises an exception?",
        old="""
        with torch.random.fork_rng(devices):
            torch.manual_seed(seed + group.rank() if split else seed)
            yield
        """,
        new="""
        state = torch.get_rng_state()
        torch.manual_seed(seed + group.rank() if split else seed)
        yield
        torch.set_rng_state(state)
        """,
    ),
    Misconception(
        exercise="sequence.region_rng",
        name="counted_passes",
        hint="This looks like: a count of your own makes the passes differ. Recomputation puts torch's random state "
        "back and goes through the region again, to drop the same elements. What does your count say then?",
        source="""
        passes = 0


        @contextmanager
        def region_rng(group, split):
            global passes
            passes += 1
            seed = 1_000 * passes + 500 * split
            with torch.random.fork_rng([]):
                torch.manual_seed(seed + group.rank() if split else seed)
                yield
        """,
    ),
    Misconception(
        exercise="sequence.region_rng",
        name="few_seeds",
        hint="This looks like: the seed is drawn from a small range of numbers, so among many regions some have the "
        "same one. How many layers, with several dropouts each, does a model of a thousand steps go through?",
        old="seed = int(torch.randint(2**62, ()))",
        new="seed = int(torch.randint(1000, ()))",
    ),
    Misconception(
        exercise="sequence.region_rng",
        name="goes_on_from_outside",
        hint="This looks like: where all ranks hold the same, the region goes on from the state outside, which is put "
        "back at the end. So its numbers are drawn once more, outside or in the next region. From what could they "
        "start instead?",
        old="""
        seed = int(torch.randint(2**62, ()))
        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(seed + group.rank() if split else seed)
            yield
        """,
        new="""
        state = torch.get_rng_state()
        try:
            if split:
                torch.manual_seed(int(torch.randint(2**40, ())) + group.rank())
            yield
        finally:
            torch.set_rng_state(state)
            torch.rand(1)
        """,
    ),
    Misconception(
        exercise="sequence.region_rng",
        name="not_a_region_where_equal",
        hint="This looks like: where all ranks hold the same, nothing is done, and torch goes on as it is. "
        "If one rank draws more numbers in there than another, what does each of them draw afterwards?",
        old="""
        with torch.random.fork_rng(devices):
            torch.manual_seed(seed + group.rank() if split else seed)
            yield
        """,
        new="""
        if not split:
            yield
            return
        with torch.random.fork_rng(devices):
            torch.manual_seed(seed + group.rank())
            yield
        """,
    ),
]
