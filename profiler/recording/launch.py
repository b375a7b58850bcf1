"""Records a command.

It starts the collector of its trace, then executes the job, in its own place or beside
itself.
"""

import contextlib
import errno
import os
import select
import shutil
import signal
import time
from pathlib import Path
from types import FrameType
from typing import NoReturn

from ebbtide.errors import TraceError
from ebbtide.profiler.agent.options import Options
from ebbtide.profiler.recording.collector import RecordedCommand, start_collector
from ebbtide.profiler.recording.lifecycle import (
    require_linux,
    spool_folder,
    write_nested_marker,
)

# Python ignores these, and a program inherits what is ignored.
_DEFAULT = (signal.SIGPIPE, signal.SIGXFSZ)
# Passed on to the job; the others end or stop this process alone.
_FORWARDED = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
)

# Of signals that the kernel sends, for the keys of a terminal.
_SI_KERNEL = 0x80
# So long a terminal waits for the trace of a job that has ended.
_FINISH_SECONDS = 60.0


def profile(
    job: RecordedCommand, output_to: int | None = None, finished: int | None = None
) -> NoReturn:
    """Become the job, whose training processes are recorded into a trace. It keeps this
    process's id, terminal, signals and standard streams (unless it gets `output_to` as
    stdout and stderr), and its exit status is its own. A collector finishes the trace
    afterwards, prints where it is to stderr, and closes the descriptor `finished`.
    Raises TraceError, and leaves nothing behind, if the command cannot be executed or
    the trace cannot be created."""
    require_linux()
    program = job.words[0]
    if shutil.which(program) is None:
        raise TraceError(f"cannot run {program}: {_why_not(program)}")
    collector = start_collector(job, finished)
    write_nested_marker()
    for number in _DEFAULT:
        signal.signal(number, signal.SIG_DFL)
    if output_to is not None:
        os.dup2(output_to, 1)
        os.dup2(output_to, 2)
    try:
        os.execvpe(
            program,
            list(job.words),
            job_environment(job.options, spool_folder(job.output)),
        )
    except OSError as error:
        reason = f"cannot run {program}: {error.strerror or error}"
        collector.cancel(reason)
        raise TraceError(reason) from None


def profile_in_terminal(job: RecordedCommand) -> int:
    """Record a job in a child of this process, and return its exit code.

    The child gets the keys of the terminal. Return once its trace is finished; end as
    the job if a signal has ended it. Raises TraceError in the child as `profile` does.
    """
    finished_read, finished_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(finished_read)
        profile(job, finished=finished_write)
    os.close(finished_write)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (*_FORWARDED, signal.SIGCHLD))
    while not _has_ended(pid):
        received = signal.sigwaitinfo((*_FORWARDED, signal.SIGCHLD))
        # The keys of the terminal reach the job, too.
        is_of_kernel = received.si_code == _SI_KERNEL
        if received.si_signo != signal.SIGCHLD and not is_of_kernel:
            os.kill(pid, received.si_signo)
    # Processes of the job may go on in the background.
    deadline_s = time.monotonic() + _FINISH_SECONDS
    is_finished = False
    while not is_finished and time.monotonic() < deadline_s:
        is_finished = bool(select.select([finished_read], [], [], 0.1)[0])
        if signal.sigpending() & {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}:
            break
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code < 0:
        with contextlib.suppress(OSError):  # of SIGKILL
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return code if code >= 0 else 128 - code


def _has_ended(pid: int) -> bool:
    """Return whether a child has ended. It is not reaped: the collector reads from it
    how it has ended."""
    flags = os.WEXITED | os.WNOWAIT | os.WNOHANG
    return os.waitid(os.P_PID, pid, flags) is not None


def _why_not(program: str) -> str:
    if os.path.isdir(program):
        return "it is a directory"
    return os.strerror(errno.EACCES if os.path.exists(program) else errno.ENOENT)


def job_environment(options: Options, spools: Path) -> dict[str, str]:
    """Return this process's environment, with the agent first on Python's path.

    This is the path of every Python that starts in the job.
    """
    inject = str(Path(__file__).resolve().parents[1] / "inject")
    path = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        **options.environment(str(spools)),
        "PYTHONPATH": inject + os.pathsep + path if path else inject,
    }


class BackgroundJob:
    """A recorded job in a process group of its own, without the terminal's keys.

    Signals are passed on to it. Its output is in `log`, RUN.log beside RUN.ebb, which
    `force` replaces, too. Raises TraceError, and leaves nothing behind, if the command
    cannot be executed or a file cannot be created.
    """

    def __init__(self, job: RecordedCommand) -> None:
        self.log = job.output.with_suffix(".log")
        log = _create(self.log, job.force)
        # Lines of the collector, to the end of the trace; the second pipe closes when
        # the job is executed.
        self._messages, messages_write = os.pipe()
        error_read, error_write = os.pipe()
        os.set_blocking(self._messages, False)
        self._text = b""
        self._is_finished = False
        self.pid = os.fork()
        if self.pid == 0:
            _become_job(job, log, messages_write, error_write)
        for descriptor in (log, messages_write, error_write):
            os.close(descriptor)
        error = b""
        while part := os.read(error_read, 4096):
            error += part
        os.close(error_read)
        if error:
            os.waitpid(self.pid, 0)
            self.log.unlink(missing_ok=True)
            raise TraceError(error.decode(errors="replace"))
        for number in _FORWARDED:
            signal.signal(number, self._forward)

    def is_finished(self) -> bool:
        """Return whether the job has ended and its trace is finished."""
        while not self._is_finished:
            try:
                part = os.read(self._messages, 1 << 16)
            except BlockingIOError:
                break
            self._text += part
            self._is_finished = not part
        return self._is_finished and _has_ended(self.pid)

    def interrupt(self) -> None:
        """Send SIGINT to all processes of the job's group, as Ctrl-C would."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGINT)

    def exit_code(self) -> int:
        """Return the exit code of the finished job.

        If a signal has ended it, this is 128 plus the signal's number.
        """
        for number in _FORWARDED:
            signal.signal(number, signal.SIG_DFL)
        _, status = os.waitpid(self.pid, 0)
        os.close(self._messages)
        code = os.waitstatus_to_exitcode(status)
        return code if code >= 0 else 128 - code

    @property
    def messages(self) -> str:
        """The lines of the collector: warnings, and where the trace is."""
        return self._text.decode(errors="replace")

    def _forward(self, number: int, _: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


def _create(path: Path, force: bool) -> int:
    flags = (
        os.O_WRONLY
        | os.O_CREAT
        | os.O_APPEND
        | os.O_CLOEXEC
        | (os.O_TRUNC if force else os.O_EXCL)
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, flags, 0o644)
    except FileExistsError as error:
        if not os.path.lexists(path):
            raise TraceError(f"cannot write {path}: {error.strerror}") from None
        raise TraceError(
            f"{path} exists already, and the job's output goes there: choose another "
            "-o, or replace it (--force)"
        ) from None
    except OSError as error:
        raise TraceError(f"cannot write {path}: {error.strerror or error}") from None


def _become_job(
    job: RecordedCommand, log: int, messages: int, error_write: int
) -> NoReturn:
    """Be the job, in the forked process."""
    try:
        os.setpgid(0, 0)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        # Of the collector, which is started next; the job has `log`.
        os.dup2(messages, 2)
        profile(job, output_to=log)
    except BaseException as error:
        os.write(error_write, str(error).encode() or repr(error).encode())
    finally:
        os._exit(2)
