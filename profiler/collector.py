"""The collector: a detached process that samples while a recorded job runs, and finishes its trace.

`ebbtide profile` starts the collector and then executes the job in its own place. So the job has the process id that
its user knows, receives each signal exactly once, and ends with its own exit status. The collector has a session of
its own, ignores the signals that end or stop jobs, and ends after the job.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn, Protocol

from ebbtide.errors import TraceError
from ebbtide.profiler.agent.options import Options
from ebbtide.profiler.exit_status import exit_meta, wait_status
from ebbtide.profiler.job_processes import job_continues
from ebbtide.profiler.recording import finish_recording, next_commands, open_recording, spool_folder
from ebbtide.profiler.trace.files import new_trace

# A scheduler sends some of these to every process of a job, and a terminal others; none of them is for the collector.
_IGNORED = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGTSTP,
    signal.SIGTTIN,
    signal.SIGTTOU,
    signal.SIGPIPE,
)
_READY = b"ready"
# Between two looks for recorded processes that outlive the job's first one.
_CHILDREN_PERIOD_S = 0.1


class JobService(Protocol):
    """A server that answers while the job runs. It listens already, and is started in the collector's process.

    Attributes:
        url: Where it answers.
    """

    url: str

    def fileno(self) -> int:
        """Return the descriptor of its socket."""

    def start(self, trace: Path) -> None:
        """Answer from now on, from threads. trace: the trace, which exists."""


class Collector:
    """The starting process's end of the connection to its collector."""

    def __init__(self, status: int, failure: int) -> None:
        self._status = status
        self._failure = failure

    def cancel(self, reason: str) -> None:
        """Make the collector remove the trace, since the job could not be executed; return when it has ended."""
        os.write(self._failure, reason.encode())
        os.close(self._failure)
        with contextlib.suppress(OSError):
            while os.read(self._status, 4096):
                pass


def start_collector(
    output: Path, command: Sequence[str], options: Options, force: bool, service: JobService | None = None
) -> Collector:
    """Start the collector of a job that this process is about to become.

    The job does not get the socket of `service`.

    Returns:
        The connection, once the trace's folder exists. Executing another program in this process closes it, which
        tells the collector that the job runs; sampling begins then.

    Raises:
        TraceError: If the trace cannot be created; nothing is left behind then.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    status_read, status_write = os.pipe()
    failure_read, failure_write = os.pipe()
    job = os.getpid()
    child = os.fork()
    if child == 0:
        # Forked twice: the job must not find a child that it did not start.
        if os.fork() == 0:
            os.close(status_read)
            os.close(failure_write)
            _run(job, status_write, failure_read, output, command, options, force, service)
        os._exit(0)
    os.waitpid(child, 0)
    os.close(status_write)
    os.close(failure_read)
    answer = b""
    while answer != _READY and (part := os.read(status_read, 4096)):
        answer += part
    if answer != _READY:
        raise TraceError(answer.decode(errors="replace") or "the collector ended before the job began")
    return Collector(status_read, failure_write)


def _run(
    job: int,
    status: int,
    failure: int,
    output: Path,
    command: Sequence[str],
    options: Options,
    force: bool,
    service: JobService | None,
) -> NoReturn:
    """Be the collector, from the fork to its end."""
    try:
        os.setsid()
        for number in _IGNORED:
            signal.signal(number, signal.SIG_IGN)
        job_end = os.pidfd_open(job)
        _keep_descriptors(status, failure, job_end, *([service.fileno()] if service else []))
        _collect(job, job_end, status, failure, output, command, options, force, service)
    except TraceError as error:
        with contextlib.suppress(OSError):
            os.write(status, str(error).encode())
    except BaseException as error:
        _say(f"the recording failed; the job was not affected: {error!r}")
    finally:
        os._exit(0)


def _keep_descriptors(*kept: int) -> None:
    """Close all inherited descriptors but stderr and `kept`.

    A process that waits for the end of one of the job's pipes must not wait for the collector.
    """
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in kept:
            with contextlib.suppress(OSError):
                os.close(int(name))


def _collect(
    job: int,
    job_end: int,
    status: int,
    failure: int,
    output: Path,
    command: Sequence[str],
    options: Options,
    force: bool,
    service: JobService | None,
) -> None:
    warned: list[str] = []

    def warn(line: str) -> None:
        warned.append(line)
        _say(line)

    with new_trace(output, force, recording=True):
        recording = open_recording(output, list(command), options, job, warn)
        if service is not None:
            _say(f"metrics: {service.url}")
        os.write(status, _READY)
        # Closed without a word when the job is executed.
        reason = os.read(failure, 4096)
        if reason:
            raise TraceError(reason.decode(errors="replace"))
    os.close(status)
    recording.sampler.start()
    if service is not None:
        service.start(output)
    _wait(job_end)
    exit_info = exit_meta(wait_status(job, job_end))
    while job_continues(spool_folder(output)):
        time.sleep(_CHILDREN_PERIOD_S)
    recording.sampler.stop()
    result = finish_recording(recording, {"exit": exit_info} if exit_info else {}, options.first)
    for line in [*result.warnings, *map(next_commands, result.traces)]:
        if line not in warned:
            _say(line)


def _wait(pidfd: int) -> None:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.poll()


def _say(line: str) -> None:
    """Print a line to the stderr that the job had, which may be closed by now."""
    with contextlib.suppress(OSError):
        os.write(2, f"ebbtide: {line}\n".encode(errors="replace"))
