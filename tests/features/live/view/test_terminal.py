"""Tests of the commands that show the view: what they refuse, and the view in a real
terminal."""

from __future__ import annotations

import os
import pty
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from ebbtide.errors import UserError
from ebbtide.features.live.view.snapshot import newest_recording
from ebbtide.profiler.agent.options import Options
from ebbtide.profiler.recording.lifecycle import open_recording
from tests.cli.test_bad_input import contents
from tests.conftest import PROCESS_TIMEOUT_S, ebbtide_in_process
from tests.profiler.agent.jobs import PRELUDE

TRACE = Path(__file__).parents[4] / "traces" / "a100-13b-async.ebb"


def test_watch__and_profile_watch_need_a_terminal_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments in (
        ["watch", str(TRACE)],
        ["profile", "--watch", "-o", "run.ebb", "--", "true"],
    ):
        result = ebbtide_in_process(*arguments)
        assert result.returncode == 2
        assert result.stdout == ""
        assert "needs a terminal" in result.stderr
        assert len(result.stderr.splitlines()) == 1
    assert contents(tmp_path) == {}


def test_watch__names_the_package_that_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "textual", None)
    result = ebbtide_in_process("watch", str(TRACE))
    assert result.returncode == 2
    assert "pip install 'ebbtide[live]'" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_newest_recording__is_the_one_that_began_last_of_those_that_run(
    tmp_path: Path,
) -> None:
    with pytest.raises(UserError, match="no recording runs"):
        newest_recording(tmp_path)
    shutil.copytree(TRACE, tmp_path / "finished.ebb")
    locks = []
    for name in ("b.ebb", "a.ebb"):
        (tmp_path / name).mkdir()
        recording = open_recording(tmp_path / name, ["python"], Options(), os.getpid())
        locks.append(recording.lock)
    assert newest_recording(tmp_path) == tmp_path / "a.ebb"
    for lock in locks:
        os.close(lock)


class Tmux:
    """A tmux server of its own with one window.

    Args:
        size: Columns and rows.
        folder: The folder in which commands run.
    """

    def __init__(self, size: tuple[int, int], folder: Path) -> None:
        self._tmux = [
            "tmux",
            "-L",
            f"ebbtide-test-{uuid4().hex[:8]}",
            "-f",
            "/dev/null",
        ]
        self._run(
            "new-session",
            "-d",
            "-x",
            str(size[0]),
            "-y",
            str(size[1]),
            "-c",
            str(folder),
            "sh",
        )

    def _run(self, *words: str) -> str:
        return subprocess.run(
            [*self._tmux, *words],
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        ).stdout

    def type(self, line: str) -> None:
        """Type a line, and Enter."""
        self._run("send-keys", "-l", line)
        self._run("send-keys", "Enter")

    def press(self, key: str) -> None:
        """Press a key by tmux's name of it."""
        self._run("send-keys", key)

    def rows(self) -> list[str]:
        """Return the rows of the screen."""
        return self._run("capture-pane", "-p").splitlines()

    def wait_for(self, shows: Callable[[str], bool]) -> list[str]:
        """Wait until the screen shows something; return its rows."""
        deadline = time.monotonic() + PROCESS_TIMEOUT_S
        while time.monotonic() < deadline:
            rows = self.rows()
            if shows("\n".join(rows)):
                return rows
            time.sleep(0.2)
        pytest.fail("the screen shows:\n" + "\n".join(self.rows()))

    def close(self) -> None:
        """End the server, and with it what runs in it."""
        subprocess.run([*self._tmux, "kill-server"], check=False, timeout=60)


@pytest.fixture
def tmux(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tmux]:
    if shutil.which("tmux") is None:
        pytest.skip("needs tmux")
    session = Tmux(request.param, tmp_path)
    yield session
    session.close()


# Trains until a file appears, then fails.
JOB = f"""{PRELUDE}
import os, sys, time
print('the job says hello', flush=True)
while not os.path.exists('end'):
    model(batch()[0]).sum().backward()
    optimizer.step()
    time.sleep(0.02)
print('the job says goodbye', flush=True)
sys.exit(7)
"""


@pytest.mark.slow
@pytest.mark.parametrize("tmux", [(80, 24), (200, 50)], indirect=True)
def test_profile_watch__shows_a_real_job_and_ends_as_it_does(
    tmux: Tmux, tmp_path: Path
) -> None:
    (tmp_path / "job.py").write_text(JOB)
    python = shlex.quote(sys.executable)
    ebbtide = f"PYTHONPATH={shlex.quote(os.getcwd())} {python} -m ebbtide"
    tmux.type(
        f"{ebbtide} profile --watch -o run.ebb -- {python} job.py; echo status=$?"
    )
    rows = tmux.wait_for(
        lambda text: "Findings of the last iterations" in text and "BB" in text
    )
    assert "recording" in rows[0]
    assert "rank 0 of 1 on cpu" in rows[0]
    assert any("heap" in row for row in rows)
    # The output of the job does not reach the screen.
    assert not any("hello" in row for row in rows)
    tmux.press("l")
    tmux.wait_for(lambda text: "the job says hello" in text)
    tmux.press("Escape")
    (tmp_path / "end").touch()
    rows = tmux.wait_for(lambda text: re.search(r"status=\d", text) is not None)
    text = "\n".join(rows)
    assert "status=7" in text
    assert "the job says goodbye" in text
    assert "output of the job: run.log" in text
    tmux.type(f"clear; {ebbtide} watch run.ebb")
    rows = tmux.wait_for(lambda text: "Findings of the trace" in text)
    assert "complete" in rows[0]
    tmux.press("q")
    tmux.wait_for(lambda text: "Findings" not in text)


@pytest.mark.slow
@pytest.mark.parametrize("tmux", [(100, 30)], indirect=True)
@pytest.mark.parametrize("leaves_first", [False, True])
def test_profile_watch__interrupts_the_job_as_a_terminal_does(
    tmux: Tmux, tmp_path: Path, leaves_first: bool
) -> None:
    (tmp_path / "job.py").write_text(JOB)
    python = shlex.quote(sys.executable)
    tmux.type(
        f"PYTHONPATH={shlex.quote(os.getcwd())} {python} -m ebbtide profile --watch -o "
        f"run.ebb -- {python} job.py"
    )
    tmux.wait_for(lambda text: "BB" in text)
    if leaves_first:
        tmux.press("q")
        tmux.wait_for(lambda text: "the job goes on, and its output follows" in text)
    tmux.press("C-c")
    tmux.wait_for(lambda text: "output of the job: run.log" in text)
    tmux.type("echo status=$?")
    rows = tmux.wait_for(lambda text: re.search(r"status=\d", text) is not None)
    assert "status=130" in "\n".join(rows)
    assert "KeyboardInterrupt" in (tmp_path / "run.log").read_text()


def test_watch__ends_with_one_line_where_the_cursor_cannot_move(tmp_path: Path) -> None:
    # A terminal of its own, of which it is told that it is dumb.
    primary, terminal = pty.openpty()
    environment = {**os.environ, "TERM": "dumb"}
    command = [sys.executable, "-m", "ebbtide", "watch", str(TRACE)]
    status = subprocess.run(
        command,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env=environment,
        timeout=60,
        check=False,
    ).returncode
    os.write(terminal, b"end")
    printed = ""
    # A read returns only what has come through the terminal by then.
    while not printed.endswith("end"):
        printed += os.read(primary, 10_000).decode()
    os.close(terminal)
    os.close(primary)
    assert status == 2
    assert "TERM is dumb" in printed
    assert printed.count("\n") == 1


def test_watch__says_what_reads_a_recording_at_a_url() -> None:
    result = ebbtide_in_process("watch", "s3://bucket/run.ebb")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("ebbtide: watch follows the files of a recorder")
    assert "`ebbtide summary s3://bucket/run.ebb`" in result.stderr
