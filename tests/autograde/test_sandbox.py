"""The sandbox: what is inside can do its work, and reach nothing else."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from autograde import sandbox

PROBE = """
import json, os, socket
def attempt(action):
    try:
        return str(action())
    except Exception as error:
        return type(error).__name__
listener = socket.create_server(("127.0.0.1", 0))
print(json.dumps({
    "secret": attempt(lambda: open({secret!r}).read()),
    "write course": attempt(lambda: open(os.path.join({course!r}, "autograde", "check.py"), "a")),
    "write root": attempt(lambda: open("/made", "w")),
    "write python": attempt(lambda: open(os.__file__, "a")),
    "write own": attempt(lambda: open("made", "w").write("x")),
    "home": attempt(lambda: os.listdir(os.path.expanduser("~"))),
    "passwords": attempt(lambda: open("/etc/shadow").read()),
    "loopback": attempt(lambda: socket.create_connection(listener.getsockname(), 5) and "connected"),
    "network": attempt(lambda: socket.create_connection(("192.0.2.1", 80), 5)),
    "interfaces": [name for _, name in socket.if_nameindex()],
    "environment": sorted(os.environ),
    "kill outside": attempt(lambda: os.kill({pid}, 0)),
    "others": len([name for name in os.listdir("/proc") if name.isdigit()]),
    "imports": attempt(lambda: __import__("torch").ones(2).sum() and __import__("fivefold.runtime.ranks").__name__),
}))
"""


@pytest.fixture
def bubblewrap() -> None:
    """Tests that need one say nothing where there is no sandbox, so they are not counted as passed there."""
    if problem := sandbox._problem():
        pytest.skip(problem)


def run(code: str, folder: Path, **options) -> subprocess.CompletedProcess:
    folder.mkdir(exist_ok=True)
    command = sandbox.sandboxed([sys.executable, "-c", code], folder)
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)


def test_it_shows_what_is_needed_and_hides_the_rest(bubblewrap, tmp_path: Path) -> None:
    """Reading, writing, network, processes and environment, each tried from inside."""
    secret = tmp_path / "gradebook.db"
    secret.write_text("grades")
    code = PROBE.replace("{secret!r}", repr(str(secret))).replace("{course!r}", repr(str(sandbox._course()[1])))
    done = run(code.replace("{pid}", str(os.getpid())), tmp_path / "own", env={**os.environ, "API_TOKEN": "x"})
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["write own"] == "1" and (tmp_path / "own/made").read_text() == "x"
    assert seen["secret"] == seen["passwords"] == "FileNotFoundError"
    assert seen["write course"] == seen["write root"] == seen["write python"] == "OSError"
    assert seen["home"] == "[]" and "API_TOKEN" not in seen["environment"]
    assert seen["loopback"] == "connected" and seen["network"] == "OSError" and seen["interfaces"] == ["lo"]
    assert seen["kill outside"] == "ProcessLookupError" and seen["others"] < 10
    assert seen["imports"] == "fivefold"


def test_no_privilege_is_left(bubblewrap, tmp_path: Path) -> None:
    """Also for root: no capability, no new namespace in which to get some back."""
    done = run("print([l for l in open('/proc/self/status') if l.startswith(('CapEff', 'CapBnd'))])", tmp_path / "own")
    assert done.stdout.count("0000000000000000") == 2
    done = run("import subprocess; print(subprocess.run(['unshare', '-U', 'true']).returncode != 0)", tmp_path / "own")
    assert "True" in done.stdout


def test_nothing_survives_it(bubblewrap, tmp_path: Path) -> None:
    """A process in a session of its own ends with the sandbox: its end of a pipe is closed."""
    read, write = os.pipe()
    code = "import subprocess; subprocess.Popen(['sleep', '7200'], start_new_session=True, close_fds=False)"
    command = sandbox.sandboxed([sys.executable, "-c", code], tmp_path)
    subprocess.run(command, pass_fds=(write,), timeout=60, check=True)
    os.close(write)
    assert os.read(read, 1) == b""  # would wait for ever if somebody held the other end
    os.close(read)


@pytest.mark.parametrize("path", ["", "/nowhere"])
def test_its_absence_is_one_line_that_says_what_to_do(monkeypatch, tmp_path: Path, path: str) -> None:
    """Without bubblewrap a command is never run outside instead."""
    monkeypatch.setenv("PATH", path)
    sandbox._problem.cache_clear()
    try:
        with pytest.raises(sandbox.NoSandbox) as caught:
            sandbox.sandboxed(["true"], tmp_path)
    finally:
        monkeypatch.undo()
        sandbox._problem.cache_clear()
    assert "install the package `bubblewrap`" in str(caught.value) and "\n" not in str(caught.value)


def test_a_sandbox_that_is_not_allowed_is_said_to_be(monkeypatch, tmp_path: Path) -> None:
    """Its own error is in the line."""
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    sandbox._problem.cache_clear()
    try:
        assert "No permissions to create new namespace" in sandbox.status()
    finally:
        sandbox._problem.cache_clear()
