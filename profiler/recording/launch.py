"""Records a command: starts the collector of its trace, then executes the job, in its
own place or beside itself."""

import contextlib
import errno
import os
import select
import shutil
import signal
import time
from collections.abc import Callable
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
            job_environment(job.options, spool_folder(job.folder)),
        )
    except OSError as error:
        reason = f"cannot run {program}: {error.strerror or error}"
        collector.cancel(reason)
        raise TraceError(reason) from None


class _ChildJob:
    """A recorded job in a child of this process.

    `become` makes the child the job, and gets the write end of a pipe. The collector
    keeps it open until the trace is finished.
    """

    def __init__(self, become: Callable[[int], NoReturn]) -> None:
        self.ended_by = 0
        self._text = b""
        self._is_closed = False
        self._pipe, write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            become(write)
        os.close(write)

    def has_ended(self) -> bool:
        """Return whether the job has ended. It is not reaped: the collector reads from
        it how it has ended."""
        flags = os.WEXITED | os.WNOWAIT | os.WNOHANG
        return os.waitid(os.P_PID, self.pid, flags) is not None

    def is_finished(self, wait_s: float = 0.0) -> bool:
        """Return whether the job has ended and its trace is finished."""
        while not self._is_closed and select.select([self._pipe], [], [], wait_s)[0]:
            part = os.read(self._pipe, 1 << 16)
            self._text += part
            self._is_closed = not part
        return self._is_closed and self.has_ended()

    def forward(self, number: int, _frame: FrameType | None = None) -> None:
        """Send a signal to the job."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def exit_code(self) -> int:
        """Return the exit code of the job.

        If a signal has ended it, this is 128 plus `ended_by`, the signal's number.
        """
        os.close(self._pipe)
        _, status = os.waitpid(self.pid, 0)
        self.ended_by = os.WTERMSIG(status)
        return 128 + self.ended_by if self.ended_by else os.WEXITSTATUS(status)


def profile_in_terminal(job: RecordedCommand) -> int:
    """Record a job in a child of this process, and return its exit code.

    The child gets the keys of the terminal. Return once its trace is finished; end as
    the job if a signal has ended it. Raises TraceError in the child as `profile` does.
    """
    child = _ChildJob(lambda pipe: profile(job, finished=pipe))
    awaited = (*_FORWARDED, signal.SIGCHLD)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    while not child.has_ended():
        received = signal.sigwaitinfo(awaited)
        # The keys of the terminal reach the job, too.
        is_of_kernel = received.si_code == _SI_KERNEL
        if received.si_signo != signal.SIGCHLD and not is_of_kernel:
            child.forward(received.si_signo)
    # Processes of the job may go on in the background.
    deadline_s = time.monotonic() + _FINISH_SECONDS
    while not child.is_finished(wait_s=0.1) and time.monotonic() < deadline_s:
        if signal.sigpending() & {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}:
            break
    code = child.exit_code()
    if child.ended_by:
        with contextlib.suppress(OSError):  # of SIGKILL
            signal.signal(child.ended_by, signal.SIG_DFL)
        os.kill(os.getpid(), child.ended_by)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return code


def _why_not(program: str) -> str:
    if os.path.isdir(program):
        return "it is a directory"
    if os.path.exists(program) and program.endswith(".py"):
        return f"it is a script: python {program}"
    return os.strerror(errno.EACCES if os.path.exists(program) else errno.ENOENT)


def job_environment(options: Options, spools: Path) -> dict[str, str]:
    """Return this process's environment, with the agent first on the path of every
    Python that starts in the job."""
    inject = str(Path(__file__).resolve().parents[1] / "inject")
    path = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        **options.environment(str(spools)),
        "PYTHONPATH": inject + os.pathsep + path if path else inject,
    }


class BackgroundJob(_ChildJob):
    """A recorded job in a process group of its own, without the terminal's keys.

    Signals are passed on to it. Its output is in `log`, RUN.log beside RUN.ebb, which
    `force` replaces, too. Raises TraceError, and leaves nothing behind, if the command
    cannot be executed or a file cannot be created.
    """

    def __init__(self, job: RecordedCommand) -> None:
        self.log = job.folder.with_suffix(".log")
        log = _create(self.log, job.force)
        # It closes when the job is executed.
        error_read, error_write = os.pipe()
        super().__init__(lambda pipe: _become_job(job, log, pipe, error_write))
        os.close(log)
        os.close(error_write)
        with open(error_read, encoding="utf-8", errors="replace") as file:
            error = file.read()
        if error:
            super().exit_code()
            self.log.unlink(missing_ok=True)
            raise TraceError(error)
        for number in _FORWARDED:
            signal.signal(number, self.forward)

    def interrupt(self) -> None:
        """Send SIGINT to all processes of the job's group, as Ctrl-C would."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGINT)

    def exit_code(self) -> int:
        """Return the exit code as `_ChildJob` does, and pass on no more signals."""
        for number in _FORWARDED:
            signal.signal(number, signal.SIG_DFL)
        return super().exit_code()

    @property
    def messages(self) -> str:
        """The lines of the collector: warnings, and where the trace is."""
        return self._text.decode(errors="replace")


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
