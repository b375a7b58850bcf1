"""Tests of jobs that run beside their view: output, exit code, signals, errors."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ebbtide.errors import TraceError
from ebbtide.profiler.agent.options import Options
from ebbtide.profiler.recording.collector import RecordedCommand
from ebbtide.profiler.recording.launch import BackgroundJob
from tests.conftest import PROCESS_TIMEOUT_S

SIGNALS = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
)


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def run(
    output: Path,
    program: str,
    while_running: Callable[[BackgroundJob], None] = lambda _: None,
) -> BackgroundJob:
    """Run a Python program as a job until it is finished."""
    job = BackgroundJob(
        RecordedCommand([sys.executable, "-c", program], output, Options())
    )
    while_running(job)
    wait_for(job.is_finished)
    return job


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PROCESS_TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_background_job__keeps_output_and_exit_code_of_the_job(tmp_path: Path) -> None:
    program = (
        "import sys; print('out', sys.stdin.read()); print('err', file=sys.stderr); "
        "sys.exit(9)"
    )
    job = run(tmp_path / "run.ebb", program)
    assert sorted(job.log.read_text().split()) == ["err", "out"]
    assert job.log == tmp_path / "run.log"
    # The collector's lines are not in the job's output.
    assert job.messages.startswith("ebbtide: nothing was recorded")
    assert job.exit_code() == 9


def test_background_job__passes_signals_on_and_interrupts_the_whole_group(
    tmp_path: Path,
) -> None:
    program = """
import os, signal, sys, time
numbers = []
def note(number, _):
    numbers.append(number)
    print(signal.Signals(number).name, flush=True)
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
    signal.signal(number, note)
if os.fork() == 0:
    signal.signal(signal.SIGINT, lambda *_: os._exit(5))
    print('ready', flush=True)
    time.sleep(100)
print('ready', flush=True)
while len(numbers) < 3:
    time.sleep(0.01)
print('child', os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
os.kill(os.getpid(), signal.SIGTERM)
"""

    def send(job: BackgroundJob) -> None:
        wait_for(lambda: job.log.read_text().count("ready") == 2)
        for number in (signal.SIGUSR1, signal.SIGTERM):
            os.kill(os.getpid(), number)
            wait_for(lambda number=number: number.name in job.log.read_text())
        job.interrupt()

    job = run(tmp_path / "run.ebb", program, send)
    assert job.log.read_text().split() == [
        "ready",
        "ready",
        "SIGUSR1",
        "SIGTERM",
        "SIGINT",
        "child",
        "5",
    ]
    assert job.exit_code() == 128 + signal.SIGTERM


def test_background_job__leaves_nothing_of_a_job_that_cannot_start(
    tmp_path: Path,
) -> None:
    with pytest.raises(TraceError, match="cannot run no-such-program"):
        BackgroundJob(
            RecordedCommand(["no-such-program"], tmp_path / "run.ebb", Options())
        )
    (tmp_path / "file").write_text("x")
    with pytest.raises(TraceError, match="cannot write"):
        BackgroundJob(
            RecordedCommand(["true"], tmp_path / "file" / "run.ebb", Options())
        )
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_background_job__replaces_output_only_if_forced(tmp_path: Path) -> None:
    (tmp_path / "run.log").write_text("mine")
    with pytest.raises(TraceError, match=r"run\.log exists already"):
        BackgroundJob(RecordedCommand(["true"], tmp_path / "run.ebb", Options()))
    assert (tmp_path / "run.log").read_text() == "mine"
    job = BackgroundJob(
        RecordedCommand(["echo", "new"], tmp_path / "run.ebb", Options(), force=True)
    )
    wait_for(job.is_finished)
    assert job.exit_code() == 0
    assert job.log.read_text() == "new\n"
