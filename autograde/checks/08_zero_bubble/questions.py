"""The self-check questions of lesson 08."""

from __future__ import annotations

from autograde.question import Question

questions = [
    Question(
        id="08.bubble",
        text="8 ranks, 32 micro-batches. On each rank a forward takes 1 ms, an input gradient 1 ms and a weight "
        "gradient 0.8 ms. For how many **ms** does a rank idle in a step with **ZB-H1**, by makespan?",
        answer=8.4,
        unit="ms",
        tolerance=0.01,
        why="(p − 1)(T_F + T_I − T_W) = 7 · 1.2",
        mistakes={
            19.6: "that is 1F1B, which waits for whole backwards: (p − 1)(T_F + T_I + T_W)",
            14: "that is 1F1B cut in two and nothing moved: the weight gradients have filled no gap yet",
            2.8: "that is (p − 1)(T_F + T_I − 2·T_W), ZB-H2 in a rank's own window",
            9.6: "the bubble is p − 1 times that: the first rank has nobody to wait for",
            0: "that is ZB-V at equal times, by another clock",
        },
    ),
    Question(
        id="08.clock",
        text="Somebody replaces ZB-H1 by ZB-H2. The profile shows every rank without a gap from its first action to "
        "its last. A step, which ends with the norm of all gradients, takes as long as before. What is wrong?",
        answer="c",
        choices={
            "a": (
                "The warm-up is too short.",
                "then there would be gaps in the ranks' rows: between the last forward and the first input gradient",
            ),
            "b": (
                "The weight gradients are too short to fill the bubble.",
                "then there would be gaps as well; in these rows there are none",
            ),
            "c": (
                "Nothing: before the norm is known, the first rank waits for the last one's end.",
                "yes: by makespan the two are equal; what ZB-H2 saves is at both ends of a step, where a flush stands",
            ),
            "d": (
                "ZB-H2 has more messages, and these take the time.",
                "it has the same messages in another order",
            ),
        },
    ),
    Question(
        id="08.memory",
        text="8 ranks, 32 micro-batches. What one micro-batch leaves behind on a rank, from its forward on, is 1.5 GB. "
        "How many **GB** of activations does a rank keep at most with **ZB-H2**, counted from F to W?",
        answer=22.5,
        unit="GB",
        tolerance=0.01,
        why="2p − 1 micro-batches are alive",
        mistakes={
            12: "that is ZB-H1: p micro-batches",
            24: "nearly: the last rank is 7 stages away from the first, there and back that is 14, and one is in work",
            48: "that is GPipe, which keeps all 32",
            13.5: "that is DualPipe, p + 1, which keeps all parameters twice besides",
            21: "2(p − 1) is the warm-up; then one more forward comes before the first input gradient",
        },
    ),
    Question(
        id="08.kept",
        text="A transformer layer's input gradient is done, its weight gradient is not. What has to be kept of it?",
        answer="b",
        choices={
            "a": (
                "All that forward saved.",
                "what the GELU, the softmax and the products of attention saved has done its work: no weight is there",
            ),
            "b": (
                "Each linear layer's input, and the gradient of its output.",
                "yes: ∂W = ∂Yᵀ X needs these two; a norm is alike",
            ),
            "c": (
                "The gradients of the outputs alone; the inputs can be dropped.",
                "∂W = ∂Yᵀ X: without X there is no weight gradient",
            ),
            "d": (
                "Nothing: the weights are still there.",
                "the weights were needed for the input gradient; their own gradient is made of other things",
            ),
        },
    ),
    Question(
        id="08.pairs",
        text="DualPipe on 16 ranks. F, I and W take 1 ms each, and a forward and a backward together 2.5 ms. By the "
        "formula of DeepSeek-V3's report, (p/2 − 1)(F&B + B − 3W), for how many **ms** does a rank idle?",
        answer=10.5,
        unit="ms",
        tolerance=0.01,
        why="7 · (2.5 + 2 − 3): B is the whole backward there",
        mistakes={
            3.5: "there B is the whole backward, I and W together: 2 ms. The zero-bubble paper's B is the half",
            22.5: "micro-batches enter at both ends: p/2 − 1, and not p − 1",
            12: "p/2 − 1 is 7",
            14: "that is with 3 ms for a pair: this one hides half a millisecond",
            15: "that is (p − 1) with B as the half",
        },
    ),
]
