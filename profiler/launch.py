"""Records a command: starts the collector of its trace, then executes the job in the place of this process."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from ebbtide.errors import TraceError
from ebbtide.profiler.agent.options import Options
from ebbtide.profiler.collector import JobService, start_collector
from ebbtide.profiler.recording import require_linux, spool_folder, write_nested_marker

# Python ignores these, and a program inherits what is ignored.
_DEFAULT = (signal.SIGPIPE, signal.SIGXFSZ)


def profile(
    command: Sequence[str],
    output: Path,
    options: Options,
    force: bool = False,
    output_to: int | None = None,
    service: JobService | None = None,
) -> NoReturn:
    """Become the job, whose training processes are recorded into a trace.

    The job keeps this process's id, standard streams, terminal and signals, and its exit status is its own. A collector
    finishes the trace when the job has ended, and prints where it is to stderr.

    The job has `output_to` as stdout and stderr; None: those of this process. `service` answers beside it.

    Raises:
        TraceError: If the command cannot be executed or the trace cannot be created; nothing is left behind then.
    """
    require_linux()
    if shutil.which(command[0]) is None:
        raise TraceError(f"cannot run {command[0]}: {_why_not(command[0])}")
    collector = start_collector(output, command, options, force, service)
    write_nested_marker()
    for number in _DEFAULT:
        signal.signal(number, signal.SIG_DFL)
    if output_to is not None:
        os.dup2(output_to, 1)
        os.dup2(output_to, 2)
    try:
        os.execvpe(command[0], list(command), job_environment(options, spool_folder(output)))
    except OSError as error:
        reason = f"cannot run {command[0]}: {error.strerror or error}"
        collector.cancel(reason)
        raise TraceError(reason) from None


def _why_not(program: str) -> str:
    if os.path.isdir(program):
        return "it is a directory"
    return os.strerror(errno.EACCES if os.path.exists(program) else errno.ENOENT)


def job_environment(options: Options, spools: Path) -> dict[str, str]:
    """Return this process's environment, with the agent first on the path of every Python that starts in the job."""
    inject = str(Path(__file__).resolve().parent / "inject")
    path = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        **options.environment(str(spools)),
        "PYTHONPATH": inject + os.pathsep + path if path else inject,
    }
