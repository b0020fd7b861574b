"""What the repository promises about itself: its packages, its lock, its commands and its licences."""

import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONDA_NAMES = {"torch": "pytorch", "matplotlib": "matplotlib-base", "playwright": "playwright-python"}
TARGETS = ("setup", "learn", "test", "grade", "build")


def requirements(lines: list[str]) -> dict[str, Requirement]:
    found = [Requirement(line) for line in lines]
    return {canonicalize_name(requirement.name): requirement for requirement in found}


def needed() -> dict[str, Requirement]:
    return requirements(PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"])


def lock() -> dict[str, Requirement]:
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    return requirements([line for line in lines if not line.startswith("#")])


def committed() -> list[Path]:
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in names.split("\0") if name and (ROOT / name).is_file()]


def test_conda_gets_the_packages_of_pyproject():
    """environment.yml asks conda-forge for the same packages in the same versions, and pip for the project alone."""
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert environment["channels"] == ["conda-forge", "nodefaults"]
    *packages, last = environment["dependencies"]
    asked = {r.name: r.specifier for r in requirements(packages).values()}
    assert asked.pop("python") == PROJECT["requires-python"]
    assert asked.pop("setuptools") == Requirement(build_system()["requires"][0]).specifier
    del asked["pip"]
    assert asked == {CONDA_NAMES.get(name, name): r.specifier for name, r in needed().items()}
    assert last == {"pip": ["--no-build-isolation -e ."]}


def build_system() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]


def test_the_lock_pins_everything_to_one_version():
    """Each line is name==version and no more: no address of a registry, no option."""
    for line in (ROOT / "requirements.lock").read_text().splitlines():
        assert line.startswith("#") or re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", line), line
    assert str(lock()["torch"].specifier) == "==2.13.0"


def test_the_lock_is_what_pyproject_asks_for():
    """Every dependency, and the build backend, is in the lock, in a version that pyproject allows."""
    pinned = {name: Version(str(r.specifier).removeprefix("==")) for name, r in lock().items()}
    for name, requirement in {**needed(), **requirements(build_system()["requires"])}.items():
        assert pinned[name] in requirement.specifier, f"{requirement} against {pinned[name]}"


def test_the_lock_is_complete():
    """Every package that an installed, locked package needs on this machine is in the lock as well."""
    pinned = lock()
    for name in pinned:
        for line in metadata.requires(name) or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                assert canonicalize_name(requirement.name) in pinned, f"{name} needs {line}"


@pytest.mark.skipif(Path(sys.prefix) != ROOT / ".venv", reason="not the environment that make setup made")
def test_the_environment_is_the_locked_one():
    """What these tests run on is what a learner gets."""
    for name, requirement in lock().items():
        assert Version(metadata.version(name)) in requirement.specifier


@pytest.mark.parametrize("name", ["fivefold", "autograde"])
def test_the_commands_are_there(name):
    """Each console command is installed, and says what it can do."""
    assert metadata.entry_points(group="console_scripts")[name].value == PROJECT["scripts"][name]
    command = Path(sys.executable).parent / name
    done = subprocess.run([command, "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("usage:"), done.stderr


def test_importing_the_packages_loads_no_torch():
    """`import fivefold` and `import autograde` are cheap; what they export comes when it is asked for."""
    program = "import sys, fivefold, autograde; assert 'torch' not in sys.modules; from fivefold import run; assert run"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_check_is_the_function_whoever_loads_its_module_first():
    """`autograde.check` is a module and a function; a package has room for one, and notebooks need the function."""
    program = """
from autograde.check import Check
from autograde import check, evaluate
import autograde
assert check is autograde.check and callable(check) and callable(evaluate) and isinstance(Check, type)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("target", TARGETS)
def test_make_has_the_target_and_sets_up_first(target, tmp_path):
    """On a clone without .venv each target would make one from the lock; nothing is executed here."""
    for name in ("Makefile", "requirements.lock", "pyproject.toml"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    dry = subprocess.run(["make", "-n", target], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert "-m venv .venv" in dry and "install" in dry and "-r requirements.lock" in dry


@pytest.mark.parametrize(("changed", "again"), [(None, False), ("requirements.lock", True), ("pyproject.toml", True)])
def test_setup_runs_again_only_for_another_lock_or_pyproject(changed, again, tmp_path):
    """What make looks at is whether the lock or pyproject is newer than the environment."""
    for age, name in enumerate(("requirements.lock", "pyproject.toml", "Makefile", ".venv/ready")):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes((ROOT / name).read_bytes() if name == "Makefile" else b"")
        os.utime(path, (1_000_000 + age, 1_000_000 + age))
    if changed:
        os.utime(tmp_path / changed, (2_000_000, 2_000_000))
    dry = subprocess.run(["make", "-n", "setup"], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert ("pip install" in dry) == again


def test_ci_runs_the_commands_that_people_run():
    """.ci/run is a script that ends in make test; the public CI calls it, and grades each notebook with make grade."""
    script = ROOT / ".ci/run"
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", script], check=True)
    assert script.read_text().rstrip().endswith("exec make test </dev/null")
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    commands = {name: [step["run"] for step in job["steps"] if "run" in step] for name, job in jobs.items()}
    assert commands["test"] == [".ci/run"]
    grade, prove = commands["grade"]
    assert grade == "make grade NOTEBOOKS=solutions/${{ matrix.notebook }}"
    assert prove.startswith(".venv/bin/autograde misconceptions ")


def test_the_licences_are_whole():
    """MIT for code, CC BY 4.0 for text, with every section of the legal code; the citation has the same version."""
    assert "Permission is hereby granted, free of charge" in (ROOT / "LICENSE").read_text()
    text = (ROOT / "LICENSE-text").read_text()
    assert [int(n) for n in re.findall(r"^Section (\d) -- ", text, re.MULTILINE)] == list(range(1, 9))
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == PROJECT["version"] and citation["license"] == ["MIT", "CC-BY-4.0"]


def test_nothing_committed_belongs_to_one_machine_or_run():
    """No absolute path of a developer's machine, no notebook with outputs, no cache."""
    for path in committed():
        name = str(path.relative_to(ROOT))
        assert not re.search(r"__pycache__|\.ipynb_checkpoints|\.egg-info|\.db$", name), name
        if path.suffix in (".py", ".md", ".toml", ".yml", ".ipynb", ".lock") and path != Path(__file__):
            text = path.read_text(encoding="utf-8")
            assert not re.search(r"/(home|Users|root)/\w+/", text), name
            assert path.suffix != ".ipynb" or '"output_type"' not in text, name
