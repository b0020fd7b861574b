"""The doctor: what it sees of this machine, and what it says where something is missing."""

import pytest
from fivefold import cli, doctor
from fivefold.doctor import Finding, Missing, table


def test_the_course_runs_here(capsys) -> None:
    """On a machine that runs these tests, everything that the course needs works: exit 0."""
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "The course runs on this machine." in out and "✗" not in out


def test_something_needed_that_is_missing_is_exit_1(capsys, monkeypatch) -> None:
    """Its line says what to do, the last line says where to look, and all the rest is still looked at."""

    def missing() -> str:
        raise Missing("papermill not installed: run make setup")

    def fine() -> str:
        return "fine"

    for name in ("_python", "_torch", "_ranks", "_notebooks", "_machine"):
        monkeypatch.setattr(doctor, name, fine)
    monkeypatch.setattr(doctor, "_grading", missing)
    monkeypatch.setattr(doctor, "_gpus", missing)
    monkeypatch.setattr(doctor, "_sandbox", lambda: 1 / 0)
    assert cli.main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "✗ grading    papermill not installed: run make setup" in out
    assert "– GPUs" in out and "– sandbox    ZeroDivisionError" in out
    assert out.rstrip().endswith("The course cannot run here yet: see grading.")


def test_what_is_good_to_have_does_not_stop_the_course() -> None:
    """No GPU and no sandbox: the course runs all the same."""
    assert "runs on this machine" in table([Finding("GPUs", False, "none", needed=False)])


@pytest.mark.parametrize("package", ["does_not_exist"])
def test_a_missing_package_is_named_with_its_remedy(package: str) -> None:
    """Found without importing anything."""
    with pytest.raises(Missing, match=f"pip install {package}"):
        doctor._require("json", package)
