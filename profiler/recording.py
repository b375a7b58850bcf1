"""Opens the trace of a recording, and finishes it; shared by `ebbtide profile` and `Tracer`."""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ebbtide
from ebbtide.errors import TraceError
from ebbtide.profiler.agent.options import Options
from ebbtide.profiler.sampler.sampler import Sampler
from ebbtide.profiler.trace.files import SPOOL, write_meta
from ebbtide.profiler.trace.reader import Trace, finish, open_trace

_NO_SPACE = "no space left on the device: the recording ends where it ran out (the job went on); the trace opens so far"


@dataclass
class RecordingResult:
    """The result of a recording.

    Attributes:
        status: The job's exit status, 128 + n for signal n.
        trace: The trace; None if nothing was recorded, and then no file is left.
        warnings: One line for each thing that is incomplete.
    """

    status: int
    trace: Trace | None
    warnings: list[str] = field(default_factory=list)


def require_linux() -> None:
    """Raise TraceError if this is not Linux: the clock, /proc and the signals of a recording are Linux's."""
    if sys.platform != "linux":
        raise TraceError(f"ebbtide records on Linux only, and this is {sys.platform}: record on a Linux machine")


def spool_folder(output: Path) -> Path:
    """Return the folder of a trace's spools."""
    return (output / SPOOL).resolve()


def open_recording(output: Path, command: list[str], options: Options) -> Sampler:
    """Fill the folder of a new trace with its first metadata and an empty folder for spools.

    Args:
        output: The trace's folder, which exists.
        command: The recorded command.
        options: What to record.

    Returns:
        The sampler, which is not yet started.
    """
    spools = spool_folder(output)
    spools.mkdir()
    sampler = Sampler(spools, max_bytes=options.max_bytes)
    write_meta(output, first_meta(command, options, sampler.host))
    return sampler


def first_meta(command: list[str], options: Options, host: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata of a trace that has just begun; its clock is CLOCK_MONOTONIC of this host."""
    wall_ns, monotonic_ns = time.time_ns(), time.monotonic_ns()
    limited = options.first or options.last is not None
    return {
        "state": "recording",
        "source": "recorded",
        "ebbtide": ebbtide.__version__,
        "command": command,
        "cwd": os.getcwd(),
        "started_wall_ns": wall_ns,
        "started_ns": monotonic_ns,
        "clock": {"name": "monotonic", "host": host["name"], "wall_offset_ns": wall_ns - monotonic_ns},
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


def finish_recording(
    output: Path, changes: dict[str, Any], warnings: list[str], status: int = 0, first_iteration: int = 0
) -> RecordingResult:
    """Turn the spools into the finished trace, as far as possible.

    Args:
        output: The trace.
        changes: Keys of the metadata to change.
        warnings: Warnings so far.
        status: The job's exit status.
        first_iteration: The first iteration that was to be recorded.

    Returns:
        The result; each thing that the trace lacks becomes a warning.
    """
    reason = explain_empty_recording(output / SPOOL, first_iteration)
    try:
        trace = finish(output, changes)
    except OSError as error:
        trace = open_trace(output)
        if error.errno == errno.ENOSPC:
            # Everything else that the trace lacks follows from this.
            return RecordingResult(status, trace, [_NO_SPACE])
        warnings.append(f"the trace could not be finished ({error.strerror or error}): it opens from its spools")
    warnings += [note for note in trace.notes if note not in warnings]
    if not trace.ranks:
        shutil.rmtree(output, ignore_errors=True)
        return RecordingResult(status, None, [*warnings, f"nothing was recorded: {reason}"])
    if not any(trace.phases(rank)["iteration"].notna().any() for rank in trace.ranks):
        warnings.append("no training iteration was seen: no optimizer of torch stepped after a backward")
    return RecordingResult(status, trace, warnings)


def explain_empty_recording(spools: Path, first_iteration: int = 0) -> str:
    """Return why no process recorded itself, from the marker files that the agent writes as it starts."""
    failed = sorted(spools.glob("failed-*"))
    if failed:
        return f"the agent could not attach ({failed[0].read_text(errors='replace')[:200]})"
    if any(spools.glob("torch-*")) and first_iteration:
        return f"the job did not get as far as iteration {first_iteration}, where --iterations begins"
    if any(spools.glob("torch-*")):
        return "torch was imported, but no module ran forward with gradients and nothing ran backward"
    if any(spools.glob("python-*")):
        return "no Python process of this command imported torch"
    return (
        "no Python process loaded the agent (was Python started with -I, -E or -S, or with a PYTHONPATH of its own, "
        "from an environment where ebbtide is not installed?)"
    )


def next_commands(trace: Trace) -> str:
    """Return the closing line of a command that writes a trace: its path, and the commands to run next."""
    path = shlex.quote(str(trace.path))
    return f"trace: {path}   next: ebbtide summary {path}   ebbtide plot {path} -o memory.png"
