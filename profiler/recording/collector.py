"""The collector: a detached process that samples while a recorded job runs, and
finishes the trace.

`ebbtide profile` starts it and then executes the job in its own place: so the job has
the process id that its user knows, receives each signal exactly once, and ends with its
own exit status. The collector has a session of its own, ignores the signals that end or
stop jobs, and ends after the job.
"""

import contextlib
import fcntl
import os
import select
import signal
import struct
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn, Protocol

from ebbtide import seams
from ebbtide.errors import TraceError, UserError
from ebbtide.profiler.agent.options import SPOOL_DIRECTORY, Options
from ebbtide.profiler.agent.spool import process_id
from ebbtide.profiler.recording.lifecycle import (
    RecordingResult,
    finish_recording,
    open_recording,
    spool_folder,
)
from ebbtide.profiler.sampler.processes import (
    process_runs,
    recorded_processes,
    start_ticks,
    stat_fields,
)
from ebbtide.profiler.trace.files import new_trace
from ebbtide.profiler.trace.trace import closing_lines
from ebbtide.terminal_lines import print_note
from ebbtide.urls import Url

# A scheduler sends some of these to every process of a job, and a terminal others; none
# of them is for the collector.
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
# A process that has not imported torch for so long is not expected to train: the server
# of a logger, for example.
_STARTING_SECONDS = 10.0
# From linux/pidfd.h: PIDFD_GET_INFO is _IOWR(0xFF, 11, struct pidfd_info); the
# structure's first version has 64 bytes.
_PIDFD_INFO = struct.Struct("<QQ11Ii")
_PIDFD_INFO_EXIT = 1 << 3
_PIDFD_GET_INFO = 3 << 30 | _PIDFD_INFO.size << 16 | 0xFF << 8 | 11


class JobService(Protocol):
    """A server that answers while the job runs. It listens already, and is started in
    the collector's process."""

    url: str

    def fileno(self) -> int:
        """Return the descriptor of its socket."""

    def start(self, trace: Path) -> None:
        """Answer from now on, from threads. trace: the trace, which exists."""

    def close(self) -> None:
        """Listen no more in this process."""


class Collector:
    """The starting process's end of the connection to its collector."""

    def __init__(self, status: int, failure: int) -> None:
        self._status = status
        self._failure = failure

    def cancel(self, reason: str) -> None:
        """Make the collector remove the trace, and return when the collector has ended.

        Call it when the job could not be executed.
        """
        os.write(self._failure, reason.encode())
        os.close(self._failure)
        with contextlib.suppress(OSError):
            while os.read(self._status, 4096):
                pass


@dataclass(frozen=True)
class RecordedCommand:
    """A command to record into `output`, here or at a URL. `force` replaces a trace
    that exists; `service` answers beside the job."""

    words: Sequence[str]
    output: Path
    options: Options
    force: bool = False
    service: JobService | None = None

    @cached_property
    def folder(self) -> Path:
        """The folder of this machine that is recorded into; a new one for a URL."""
        if not isinstance(self.output, Url):
            return self.output
        return Path(tempfile.mkdtemp(prefix="ebbtide-")) / self.output.name


def start_collector(command: RecordedCommand, finished: int | None = None) -> Collector:
    """Start the collector of this process's future job; return once the trace exists.

    The job is what this process is about to become. It keeps the descriptor `finished`
    open until the trace is finished. Executing another program in this process closes a
    pipe, which begins the sampling. The job does not get the socket of the service.
    Raises TraceError, and leaves nothing behind, if the trace cannot be created.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    status_read, status_write = os.pipe()
    failure_read, failure_write = os.pipe()
    job, _ = os.getpid(), command.folder
    child = os.fork()
    if child == 0:
        # Forked twice: the job must not find a child that it did not start.
        if os.fork() == 0:
            os.close(status_read)
            os.close(failure_write)
            _run(command, job, status_write, failure_read, finished)
        os._exit(0)
    os.waitpid(child, 0)
    os.close(status_write)
    os.close(failure_read)
    answer = b""
    while answer != _READY and (part := os.read(status_read, 4096)):
        answer += part
    if answer != _READY:
        raise TraceError(
            answer.decode(errors="replace")
            or "the collector ended before the job began"
        )
    return Collector(status_read, failure_write)


def _run(
    command: RecordedCommand, job: int, status: int, failure: int, finished: int | None
) -> NoReturn:
    """Be the collector, from the fork to its end."""
    try:
        # What has the name in this process may be another stream.
        with contextlib.suppress(OSError):
            sys.stderr = os.fdopen(2, "w", errors="backslashreplace", closefd=False)
        os.setsid()
        for number in _IGNORED:
            signal.signal(number, signal.SIG_IGN)
        job_end = os.pidfd_open(job)
        _keep_descriptors(
            status,
            failure,
            job_end,
            *([command.service.fileno()] if command.service else []),
            *([] if finished is None else [finished]),
        )
        _collect(command, job, job_end, status, failure)
    except UserError as error:
        with contextlib.suppress(OSError):
            os.write(status, str(error).encode())
    except BaseException as error:
        _say(f"the recording failed; the job was not affected: {error!r}")
    finally:
        if isinstance(command.output, Url):
            # Unless a trace or a log is still there.
            with contextlib.suppress(OSError):
                command.folder.parent.rmdir()
        os._exit(0)


def _keep_descriptors(*kept: int) -> None:
    """Close inherited descriptors but stderr and `kept`.

    Whoever reads the job's pipes must not wait for the collector.
    """
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in kept:
            with contextlib.suppress(OSError):
                os.close(int(name))


def _collect(
    command: RecordedCommand, job: int, job_end: int, status: int, failure: int
) -> None:
    output, service, upload = command.folder, command.service, None
    warned: list[str] = []

    def warn(line: str) -> None:
        warned.append(line)
        _say(line)

    with new_trace(output, command.force, recording=True):
        recording = open_recording(
            output, list(command.words), command.options, job, warn
        )
        if service is not None:
            _say(f"metrics: {service.url}")
        if isinstance(command.output, Url):
            upload = seams.service("upload")(command.output, output, command.force)
            upload.start()
        os.write(status, _READY)
        # Closed without a word when the job is executed.
        reason = os.read(failure, 4096)
        if reason:
            raise TraceError(reason.decode(errors="replace"))
    os.close(status)
    recording.sampler.start()
    if service is not None:
        service.start(output)
    ended = select.poll()
    ended.register(job_end, select.POLLIN)
    ended.poll()
    exit_info = exit_meta(wait_status(job, job_end))
    while job_continues(spool_folder(output)):
        time.sleep(_CHILDREN_PERIOD_S)
    recording.sampler.stop()
    result = finish_recording(
        recording, {"exit": exit_info} if exit_info else {}, command.options.first
    )
    if upload is not None:
        result = _uploaded(upload, result)
    for line in [
        *result.warnings,
        *chain.from_iterable(map(closing_lines, result.traces)),
    ]:
        if line not in warned:
            _say(line)


def _uploaded(upload: Any, result: RecordingResult) -> RecordingResult:
    """Return a result whose traces are at their URL, else with a line on why not."""
    try:
        return RecordingResult(upload.finish(result.traces), result.warnings)
    except (OSError, UserError) as error:
        kept = f"{error}: the trace is still here, as below"
        return RecordingResult(result.traces, [*result.warnings, kept])


def _say(line: str) -> None:
    """Print a line to the stderr that the job had, which may be closed by now."""
    with contextlib.suppress(OSError):
        print_note(line)


def job_continues(spools: Path) -> bool:
    """Return whether a process of the job runs that is, or may yet be, recorded.

    Such a process is recorded, has imported torch, or has begun only just now.
    """
    with_torch = {process_id(path.name) for path in spools.glob("torch-*")}
    # The environments of all processes of the host are read only where these have
    # ended.
    return any(
        process_runs(pid) for pid in recorded_processes(spools) | with_torch
    ) or any(_age_s(pid) < _STARTING_SECONDS for pid in _with_environment(spools))


def _with_environment(spools: Path) -> list[int]:
    """Return the processes that inherited the environment of the job."""
    entry = f"{SPOOL_DIRECTORY}={spools}".encode()
    pids = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            environment = Path(f"/proc/{name}/environ").read_bytes()
        except OSError:
            continue
        if entry in environment.split(b"\0"):
            pids.append(int(name))
    return pids


def _age_s(pid: int) -> float:
    ticks = start_ticks(pid)
    if ticks is None:
        return float("inf")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def wait_status(pid: int, pidfd: int) -> int | None:
    """Return the wait status of an ended process.

    Return None if the kernel (before 6.15) has given it to the parent.
    """
    info = bytearray(_PIDFD_INFO.size)
    struct.pack_into("<Q", info, 0, _PIDFD_INFO_EXIT)
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, info)
    except OSError:
        return _status_of_zombie(pid)
    mask, *_, status = _PIDFD_INFO.unpack(info)
    return status if mask & _PIDFD_INFO_EXIT else _status_of_zombie(pid)


def _status_of_zombie(pid: int) -> int | None:
    """Return the last field of /proc/PID/stat, the wait status, which is there until
    the parent has waited for the process."""
    fields = stat_fields(pid)
    return int(fields[-1]) if fields and fields[0] == "Z" else None


def exit_meta(status: int | None) -> dict[str, int] | None:
    """Return `exit` of a trace's metadata for a wait status: {"code": n} or {"signal":
    n}; None if not known."""
    if status is None:
        return None
    return (
        {"signal": os.WTERMSIG(status)}
        if os.WIFSIGNALED(status)
        else {"code": os.WEXITSTATUS(status)}
    )
