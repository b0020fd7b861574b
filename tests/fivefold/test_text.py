"""The text is real, the same everywhere, and labels follow their tokens."""

import pytest
import torch
from fivefold import text


def test_the_corpus_is_english_of_a_useful_size():
    """Bytes of the language reference."""
    everything = text.corpus()
    assert everything.dtype == torch.int64 and 300_000 < len(everything) < 900_000
    assert 'The "while" statement' in bytes(everything.tolist()).decode()
    train, test = text.split(0.1)
    assert torch.equal(torch.cat([train, test]), everything) and 0.09 < len(test) / len(everything) < 0.11


def test_labels_are_the_tokens_that_follow():
    """Each label is the next input; one seed gives one set of sequences, another seed another."""
    train, _ = text.split()
    inputs, labels = text.sequences(train, 7, 33, seed=4)
    assert inputs.shape == labels.shape == (7, 33) and torch.equal(inputs[:, 1:], labels[:, :-1])
    assert torch.equal(text.sequences(train, 7, 33, seed=4)[0], inputs)
    assert not torch.equal(text.sequences(train, 7, 33, seed=5)[0], inputs)
    joined = bytes(train.tolist())
    assert all(bytes([*row.tolist(), last]) in joined for row, last in zip(inputs, labels[:, -1].tolist(), strict=True))


def test_a_text_that_is_too_short_is_one_clear_line():
    """It names the number to change."""
    with pytest.raises(ValueError, match="the text has 5 tokens: make the sequence shorter"):
        text.sequences(torch.arange(5), 1, 5, 0)
