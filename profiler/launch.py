"""Records a command: starts it with the agent in its environment, samples while it runs, and finishes the trace."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from ebbtide.errors import TraceError
from ebbtide.profiler.agent.options import Options
from ebbtide.profiler.recording import (
    RecordingResult,
    finish_recording,
    open_recording,
    require_linux,
    spool_folder,
)
from ebbtide.profiler.trace.files import new_trace

# A scheduler or a person sends these to the process that they started.
_FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# A terminal sends these to the job as well. They are passed on only if they came from elsewhere.
_FROM_TERMINAL = (signal.SIGINT, signal.SIGQUIT)


def profile(command: Sequence[str], output: Path, options: Options, force: bool = False) -> RecordingResult:
    """Run a command and record its training processes into a trace.

    The job keeps its own stdin, stdout and stderr.

    Args:
        command: The command and its arguments.
        output: The trace to write.
        options: What to record.
        force: Whether to replace a trace that exists.

    Raises:
        TraceError: If the command cannot be started or the trace cannot be created; nothing is left behind then.
    """
    require_linux()
    with new_trace(output, force):
        sampler = open_recording(output, list(command), options)
        try:
            process = subprocess.Popen(command, env=job_environment(options, spool_folder(output)))
        except OSError as error:
            raise TraceError(f"cannot run {command[0]}: {error.strerror or error}") from None
    sampler.start()
    return_code = _wait(process)
    sampler.stop()
    status = return_code if return_code >= 0 else 128 - return_code
    changes = {
        "host": sampler.host,
        "ended_wall_ns": time.time_ns(),
        "exit": {"code": return_code} if return_code >= 0 else {"signal": -return_code},
        "notes": list(sampler.notes),
    }
    return finish_recording(output, changes, list(sampler.notes), status, options.first)


def job_environment(options: Options, spools: Path) -> dict[str, str]:
    """Return this process's environment, with the agent first on the path of every Python that starts in the job."""
    inject = str(Path(__file__).resolve().parent / "inject")
    path = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        **options.environment(str(spools)),
        "PYTHONPATH": inject + os.pathsep + path if path else inject,
    }


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Wait for the job, passing signals on to it; return its return code, negative for a signal."""

    def forward(number: int, _: FrameType | None) -> None:
        if number in _FORWARDED or not _in_foreground():
            process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in _FORWARDED + _FROM_TERMINAL}
    try:
        return process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _in_foreground() -> bool:
    """Return whether a key of the controlling terminal reaches this process, and therefore the job."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)
