"""Recording a command: start it with the agent in its environment, sample beside it, finish the trace."""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import ebbtide
from ebbtide.errors import TraceError
from ebbtide.profiler.agent.options import Options
from ebbtide.profiler.sampler.sampler import Sampler
from ebbtide.profiler.trace.files import SPOOL, new_trace, write_meta
from ebbtide.profiler.trace.reader import Trace, finish, open_trace

# What a scheduler or a person sends to the process it started.
_FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# A terminal sends these to the job as well; only when they came from elsewhere are they ours to pass on.
_FROM_TERMINAL = (signal.SIGINT, signal.SIGQUIT)

_NO_SPACE = "no space left on the device: the recording ends where it ran out (the job went on); the trace opens so far"


@dataclass
class Outcome:
    """status: the job's exit status, 128 + n for signal n. trace: what was recorded, None if nothing was and nothing
    was left. warnings: a line each."""

    status: int
    trace: Trace | None
    warnings: list[str] = field(default_factory=list)


def profile(command: Sequence[str], output: Path, options: Options, force: bool = False) -> Outcome:
    """Run `command` and record its training processes into the trace `output`.

    The job keeps its own stdin, stdout and stderr. Raises TraceError where the command cannot be started or
    the trace cannot be made; nothing is left behind then.
    """
    with new_trace(output, force):
        sampler = begin(output, list(command), options)
        try:
            process = subprocess.Popen(command, env=environment(options, spool_folder(output)))
        except OSError as error:
            raise TraceError(f"cannot run {command[0]}: {error.strerror or error}") from None
    sampler.start()
    returned = _wait(process)
    sampler.stop()
    status = returned if returned >= 0 else 128 - returned
    warnings = list(sampler.notes)
    changes = {
        "host": sampler.host,
        "ended_wall_ns": time.time_ns(),
        "exit": {"code": returned} if returned >= 0 else {"signal": -returned},
        "notes": list(sampler.notes),
    }
    return closing(output, changes, warnings, status, options.first)


def spool_folder(output: Path) -> Path:
    return (output / SPOOL).resolve()


def begin(output: Path, command: list[str], options: Options) -> Sampler:
    """Fill the folder of a new trace with what its recording starts from; the sampler is not yet started."""
    spools = spool_folder(output)
    spools.mkdir()
    sampler = Sampler(spools, max_bytes=options.max_bytes)
    write_meta(output, opening_meta(command, options, sampler.host))
    return sampler


def opening_meta(command: list[str], options: Options, host: dict[str, Any]) -> dict[str, Any]:
    """The meta of a trace that has just begun; the clock is CLOCK_MONOTONIC of this host."""
    wall, monotonic = time.time_ns(), time.monotonic_ns()
    limited = options.first or options.last is not None
    return {
        "state": "recording",
        "source": "recorded",
        "ebbtide": ebbtide.__version__,
        "command": command,
        "cwd": os.getcwd(),
        "started_wall_ns": wall,
        "started_ns": monotonic,
        "clock": {"name": "monotonic", "host": host["name"], "wall_offset_ns": wall - monotonic},
        "host": host,
        "options": {
            "iterations": [options.first, options.last] if limited else None,
            "max_bytes": options.max_bytes,
            "poll_ms": options.poll_ms,
            "allocator_iterations": options.allocator_iterations,
            "transfers": options.transfers,
        },
        **({"warmup_iterations": 0} if options.first >= 2 else {}),
        "ranks": [],
        "notes": [],
    }


def closing(output: Path, changes: dict[str, Any], warnings: list[str], status: int = 0, first: int = 0) -> Outcome:
    """Finish the trace as far as that goes; what is not whole about it becomes a warning. first: the iteration from
    which on was to be recorded."""
    reasons = why_nothing(output / SPOOL, first)
    try:
        trace = finish(output, changes)
    except OSError as error:
        trace = open_trace(output)
        if error.errno == errno.ENOSPC:
            # Everything else that is not whole about the trace follows from this.
            return Outcome(status, trace, [_NO_SPACE])
        warnings.append(f"the trace could not be finished ({error.strerror or error}): it opens from its spools")
    warnings += [note for note in trace.notes if note not in warnings]
    if not trace.ranks:
        shutil.rmtree(output, ignore_errors=True)
        return Outcome(status, None, [*warnings, f"nothing was recorded: {reasons}"])
    if not any(trace.phases(rank)["iteration"].notna().any() for rank in trace.ranks):
        warnings.append("no training iteration was seen: no optimizer of torch stepped after a backward")
    return Outcome(status, trace, warnings)


def environment(options: Options, spools: Path) -> dict[str, str]:
    """The job's environment: ours, with the agent first on the path of every Python that starts in it."""
    inject = str(Path(__file__).resolve().parent / "inject")
    path = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        **options.environment(str(spools)),
        "PYTHONPATH": inject + os.pathsep + path if path else inject,
    }


def why_nothing(spools: Path, first: int = 0) -> str:
    """Why no process recorded itself, from the marks that the agent leaves on its way."""
    failed = sorted(spools.glob("failed-*"))
    if failed:
        return f"the agent could not attach ({failed[0].read_text(errors='replace')[:200]})"
    if any(spools.glob("torch-*")) and first:
        return f"the job did not get as far as iteration {first}, where --iterations begins"
    if any(spools.glob("torch-*")):
        return "torch was imported, but no module ran forward with gradients and nothing ran backward"
    if any(spools.glob("python-*")):
        return "no Python process of this command imported torch"
    return (
        "no Python process loaded the agent (was Python started with -I, -E or -S, or with a PYTHONPATH of its own, "
        "from an environment where ebbtide is not installed?)"
    )


def next_commands(trace: Trace) -> str:
    """The closing line: where the trace is, and what to type next."""
    path = shlex.quote(str(trace.path))
    return f"trace: {path}   next: ebbtide summary {path}   ebbtide plot {path} -o memory.png"


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Wait for the job, passing signals on to it; its return code, negative for a signal."""

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
    """Whether a key of the controlling terminal reaches this process, and so the job."""
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


if sys.platform != "linux":
    raise ImportError("ebbtide records on Linux only")
