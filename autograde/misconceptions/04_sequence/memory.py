"""Misconceptions of lesson 04: the bytes of activations."""

from __future__ import annotations

from autograde.misconception import Misconception

ACTIVATION_BYTES = [
    Misconception(
        exercise="cost.activation_bytes",
        name="everything_split",
        hint="This looks like: without sequence parallelism all 34 bytes are split by t. "
        "Which of a layer's activations does every rank have for all tokens, in tensor parallelism alone?",
        old="replicated = 10 / t if sequence_parallel else 10",
        new="replicated = 10 / t",
    ),
    Misconception(
        exercise="cost.activation_bytes",
        name="only_norms_whole",
        hint="This looks like: of what every rank has for all tokens, only the inputs of the two norms are counted. "
        "Which masks, and which inputs of matrices, are whole in tensor parallelism alone too?",
        old="return s * b * h * (replicated + 24 / t + core / t)",
        new="""
        if not sequence_parallel:
            return s * b * h * (4 + 30 / t + core / t)
        return s * b * h * (replicated + 24 / t + core / t)
        """,
    ),
    Misconception(
        exercise="cost.activation_bytes",
        name="core_not_split",
        hint="This looks like: the attention core is counted whole on every rank. Who has the scores of which heads?",
        old="return s * b * h * (replicated + 24 / t + core / t)",
        new="return s * b * h * (replicated + 24 / t + core)",
    ),
    Misconception(
        exercise="cost.activation_bytes",
        name="selective_keeps_nothing_of_attention",
        hint="This looks like: with selective recomputation the whole attention is computed again, 11 bytes of it too. "
        "What does `recompute.selective` take, and what does it keep?",
        old="return s * b * h * (replicated + 24 / t + core / t)",
        new="""
        attention = 8 / t if recompute == "selective" else 0
        return s * b * h * (replicated + 24 / t + core / t - attention)
        """,
    ),
    Misconception(
        exercise="cost.activation_bytes",
        name="full_input_split",
        hint="This looks like: with full recomputation the layer's input is split by t. With split tokens a program "
        "can do that, and yours does. What does the paper's table say, which this function is to give?",
        old="return 2 * s * b * h",
        new="return 2 * s * b * h / (t if sequence_parallel else 1)",
    ),
    Misconception(
        exercise="cost.activation_bytes",
        name="one_byte_for_a_probability",
        hint="This looks like: scores, probabilities and their dropout are counted with other sizes than 16-bit "
        "numbers and masks of one byte. How many bytes do you get for one pair of tokens and one head?",
        old='core = 0 if recompute == "selective" else 5 * a * s / h',
        new='core = 0 if recompute == "selective" else 3 * a * s / h',
    ),
    Misconception(
        exercise="cost.activation_bytes",
        name="whole_bytes",
        hint="This looks like: 24 is divided by t without a remainder. That is right for 8 ranks, and for 4. "
        "What is 24/5?",
        old="return s * b * h * (replicated + 24 / t + core / t)",
        new="return s * b * h * (replicated + 24 // t + core / t)",
    ),
    Misconception(
        exercise="cost.activation_bytes",
        name="refused_without_split_tokens_only",
        hint="This looks like: an unknown word is taken for a known one, at least where tokens are split. "
        "Which of your lines is reached in both cases?",
        old='if recompute not in ("none", "selective", "full"):',
        new='if not sequence_parallel and recompute not in ("none", "selective", "full"):',
    ),
]
