"""`fivefold plan`: the table, JSON, and the one line that says what cannot be."""

import json

import pytest
from fivefold.cli import main

SMALL = ["plan", "llama3-8b", "--gpus", "16", "--context", "8192", "--batch", str(1 << 19)]


def test_table_and_explanation(capsys: pytest.CaptureFixture) -> None:
    """It says how many plans were tried and fit, ranks them, and explains the first part by part."""
    assert main([*SMALL, "--top", "3"]) == 0
    text = capsys.readouterr().out
    assert "plans tried" in text and "The first, part by part" in text and "GB/s" in text
    assert text.count("ZeRO-") == 4


def test_json_is_the_same_search(capsys: pytest.CaptureFixture) -> None:
    """Its plans are in order, with time and memory by part that add up."""
    assert main([*SMALL, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["fit"] <= report["tried"] and len(report["plans"]) == 10
    times = [found["step_seconds"] for found in report["plans"]]
    assert times == sorted(times)
    for found in report["plans"]:
        assert found["step_seconds"] == pytest.approx(sum(found["seconds"].values()))
        assert found["memory_bytes"] <= found["memory"]["limit"]


def test_sizes_in_the_place_of_a_name(capsys: pytest.CaptureFixture) -> None:
    """A model of one's own, with experts."""
    sizes = "layers=8,hidden=1024,heads=16,kv_heads=4,ffn=2816,vocabulary=32000,experts=8,top_k=2"
    assert main(["plan", sizes, "--gpus", "8", "--context", "2048", "--cluster", "a100", "--top", "1"]) == 0
    assert "your model" in capsys.readouterr().out


def test_all_shows_what_does_not_fit_too(capsys: pytest.CaptureFixture) -> None:
    """With --all every plan that was tried is ranked, and each says whether it fits."""
    assert main([*SMALL, "--all", "--json", "--top", "100000"]) == 0
    report = json.loads(capsys.readouterr().out)
    fits = [found["fits"] for found in report["plans"]]
    assert len(fits) == report["tried"] and sum(fits) == report["fit"] < len(fits)
    assert fits == sorted(fits, reverse=True)


def test_nothing_fits_is_exit_1(capsys: pytest.CaptureFixture) -> None:
    """And it says what to change."""
    assert main(["plan", "llama3-405b", "--gpus", "8", "--context", "8192"]) == 1
    assert "nothing fits" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["gpt-5", "--gpus", "8", "--context", "2048"], "no model called 'gpt-5'"),
        (["layers=4,hidden=64", "--gpus", "8", "--context", "64"], "has no heads, kv_heads, ffn, vocabulary"),
        (["llama3-8b", "--gpus", "8", "--context", "8192", "--batch", "9000"], "no whole number of sequences"),
        (["llama3-8b", "--gpus", "0", "--context", "8192"], "1 or more"),
    ],
)
def test_one_line_says_what_cannot_be(arguments: list[str], says: str, capsys: pytest.CaptureFixture) -> None:
    """Exit code 2 and one line on stderr."""
    assert main(["plan", *arguments]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1
