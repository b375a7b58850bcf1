"""Each signal reaches the job once, whoever sends it, and the job starts in the state
that it would have bare."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.conftest import PROCESS_TIMEOUT_S, running_process
from tests.profiler.harm.programs import (
    iterations_of,
    job_lines,
    profile_command,
    run_bare,
    run_process,
    run_profiled,
    training_program,
)

# Trains until a signal ends it, and prints each signal with its count.
COUNTING = """
import signal, time
counts = {}
def count(number, frame):
    name = signal.Signals(number).name
    counts[name] = counts.get(name, 0) + 1
    os.write(1, f"{name} {counts[name]}\\n".encode())
for number in (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM):
    signal.signal(number, count)
train(3)
os.write(1, b"ready\\n")
while True:
    train(1)
    time.sleep(0.01)
"""


@pytest.fixture(autouse=True)
def hangups_end_jobs() -> Iterator[None]:
    """Let jobs start with the default of SIGHUP also where the tests run under nohup,
    whose children ignore it."""
    # A handler is not inherited by a program that is executed, and keeps a hangup from
    # ending the tests.
    before = signal.signal(signal.SIGHUP, lambda *_: None)
    yield
    signal.signal(signal.SIGHUP, before)


def _signalled(command: Sequence[str]) -> tuple[list[str], int]:
    """Send signals to a running job; return what it printed and its return code.

    Each signal waits for the line that reports the one before: signals of the same
    number merge while one is pending.
    """
    with running_process(command) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline()]
        for _ in range(8):
            os.killpg(process.pid, signal.SIGUSR1)
            lines.append(process.stdout.readline())
        os.killpg(process.pid, signal.SIGINT)
        lines.append(process.stdout.readline())
        os.kill(process.pid, signal.SIGTERM)
        lines.append(process.stdout.readline())
        time.sleep(0.5)
        os.killpg(process.pid, signal.SIGHUP)
        lines += process.stdout
        return [line.strip() for line in lines], process.wait(PROCESS_TIMEOUT_S)


def test_profile__delivers_each_signal_once_to_the_job(tmp_path: Path) -> None:
    job = training_program(tmp_path, COUNTING)
    expected = [
        "ready",
        *(f"SIGUSR1 {number}" for number in range(1, 9)),
        "SIGINT 1",
        "SIGTERM 1",
    ]
    path = tmp_path / "run.ebb"
    assert _signalled(profile_command(path, sys.executable, job)) == (
        expected,
        -signal.SIGHUP,
    )
    assert iterations_of(path) >= 3


@pytest.mark.slow
def test_profile__delivers_signals_as_a_bare_run_does(tmp_path: Path) -> None:
    command = [sys.executable, str(training_program(tmp_path, COUNTING))]
    assert _signalled(profile_command(tmp_path / "run.ebb", *command)) == _signalled(
        command
    )


@pytest.mark.slow
def test_profile__delivers_the_signal_of_timeout_once(tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    # As jobs do that save a checkpoint at the first signal and give up at the second.
    program = """
import signal, sys, time
counts = [0]
def count(*_):
    counts[0] += 1
signal.signal(signal.SIGTERM, count)
deadline = time.monotonic() + 60
while not counts[0] and time.monotonic() < deadline:
    time.sleep(0.1)
time.sleep(0.5)
print(counts[0])
sys.exit(3)
"""
    job.write_text(program)
    # Without --foreground it also signals its group, so that the job may get the signal
    # twice.
    timeout = ("timeout", "--foreground", "-s", "TERM")
    bare = run_bare(*timeout, "2", sys.executable, job, cwd=tmp_path)
    profiled = run_process(
        [*timeout, "5", *profile_command("run.ebb", sys.executable, job)], cwd=tmp_path
    )
    assert (bare.stdout, bare.returncode) == ("1\n", 124)
    assert (profiled.stdout, profiled.returncode) == (bare.stdout, bare.returncode)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGSEGV, signal.SIGINT])
def test_profile__ends_by_the_signal_that_ends_the_job(
    number: signal.Signals, tmp_path: Path
) -> None:
    program = (
        f"train(2)\nimport signal\nsignal.signal({int(number)}, "
        f"signal.SIG_DFL)\nos.kill(os.getpid(), {int(number)})\n"
    )
    job = training_program(tmp_path, program)
    run = run_profiled(sys.executable, job, cwd=tmp_path)
    assert run.returncode == -number
    assert iterations_of(tmp_path / "run.ebb") == 2


class _OnTerminal:
    """A process whose controlling terminal is a new pseudo-terminal."""

    def __init__(self, command: Sequence[str]) -> None:
        self.terminal, slave = os.openpty()
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(slave)
        self.output = ""

    def read_until(self, text: str) -> None:
        """Read the terminal until `text` was printed."""
        while text not in self.output:
            self.output += os.read(self.terminal, 4096).decode()


@pytest.mark.slow
def test_profile__delivers_ctrl_c_once_and_survives_the_end_of_the_terminal(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run.ebb"
    job = _OnTerminal(
        profile_command(path, sys.executable, training_program(tmp_path, COUNTING))
    )
    try:
        job.read_until("ready")
        os.write(job.terminal, b"\x03")
        job.read_until("SIGINT 1")
        time.sleep(0.5)
        os.write(job.terminal, b"\x03")
        job.read_until("SIGINT 2")
        assert "SIGINT 3" not in job.output
        os.close(job.terminal)
        assert job.process.wait(PROCESS_TIMEOUT_S) == -signal.SIGHUP
    finally:
        job.process.kill()
        job.process.wait()
    assert iterations_of(path) >= 3


# Run by sh, since Python itself ignores SIGPIPE and SIGXFSZ.
STATE = """
grep -E '^(SigBlk|SigIgn|SigCgt|Umask|NoNewPrivs)' /proc/self/status
ls /proc/self/fd
ulimit -a
pwd
cut -d ' ' -f 5,6,7,8 /proc/$$/stat | sed "s/\\b$$\\b/self/g"
env | grep -v -E '^(EBBTIDE_[A-Z]*|PYTHONPATH|_)=' | sort
"$PYTHON" -c '
import os
try:
    print("child", os.waitpid(-1, os.WNOHANG))
except ChildProcessError:
    print("no child")
'
"""


def test_profile__starts_the_job_in_the_state_of_a_bare_run(tmp_path: Path) -> None:
    (tmp_path / "state.sh").write_text(STATE.replace("$PYTHON", sys.executable))
    bare = run_bare("sh", "state.sh", cwd=tmp_path)
    profiled = run_profiled("sh", "state.sh", cwd=tmp_path)
    assert bare.stdout.count("\n") > 20
    assert "no child" in bare.stdout
    assert profiled.stdout == bare.stdout
    assert job_lines(profiled.stderr) == job_lines(bare.stderr)


def test_profile__gives_the_job_no_child_process(tmp_path: Path) -> None:
    program = (
        "import os; "
        "print(open(f'/proc/{os.getpid()}/task/{os.getpid()}/children').read(), "
        "flush=True)"
    )
    run = run_profiled(sys.executable, "-c", program, cwd=tmp_path)
    assert (run.returncode, run.stdout) == (0, "\n")
