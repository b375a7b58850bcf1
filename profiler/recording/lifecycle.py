"""Opens the trace of a recording, and finishes it.

`ebbtide profile` and `Tracer` share it.
"""

import contextlib
import errno
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ebbtide
from ebbtide import seams
from ebbtide.errors import TraceError
from ebbtide.profiler.agent import process_recorder
from ebbtide.profiler.agent.options import SPOOL_DIRECTORY, Options
from ebbtide.profiler.recording.lock import lock_recording
from ebbtide.profiler.recording.spools.recovery import recovered_traces
from ebbtide.profiler.sampler.sampler import Sampler
from ebbtide.profiler.trace.files import (
    drop_ranks,
    drop_spools,
    new_trace,
    read_meta,
    write_meta,
    write_rank,
)
from ebbtide.profiler.trace.iterations import explain_no_iterations
from ebbtide.profiler.trace.schema import SPOOL, TABLES
from ebbtide.profiler.trace.trace import Trace

_NO_SPACE = (
    "no space left on the device: the recording ends where it ran out (the job went "
    "on); the trace opens so far"
)


@dataclass
class RecordingResult:
    """A trace for each recorded training; if there is none, no file is left."""

    traces: list[Trace]
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class OpenRecording:
    """A trace that is being recorded. `sampler`: its sampler, not yet started."""

    output: Path
    command: list[str]
    sampler: Sampler
    lock: int
    folder: tuple[int, int]

    @property
    def is_in_place(self) -> bool:
        """Whether the folder is still the one that was created."""
        try:
            return _identity(self.output) == self.folder
        except OSError:
            return False


def require_linux() -> None:
    """Raise TraceError if this is not Linux.

    The clock, /proc and the signals of a recording are Linux's.
    """
    if sys.platform != "linux":
        raise TraceError(
            f"ebbtide records on Linux only, and this is {sys.platform}: record on a "
            "Linux machine"
        )


def spool_folder(output: Path) -> Path:
    """Return the folder of a trace's spools."""
    return (output / SPOOL).resolve()


def open_recording(
    output: Path,
    command: list[str],
    options: Options,
    job: int,
    warn: Callable[[str], None] = lambda _: None,
) -> OpenRecording:
    """Fill the folder of a new trace: metadata, folder of spools, lock. `warn` gets
    warnings while the job runs. Raises UserError for details that no feature
    records."""
    if options.has_details:
        seams.require_service("slices")
    spools = spool_folder(output)
    spools.mkdir()
    lock = lock_recording(output, job)
    sampler = Sampler(spools, max_bytes=options.max_bytes, warn=warn)
    write_meta(output, first_meta(command, options, sampler.host))
    return OpenRecording(output, command, sampler, lock, _identity(output))


def _identity(folder: Path) -> tuple[int, int]:
    status = os.stat(folder)
    return status.st_dev, status.st_ino


def first_meta(
    command: list[str], options: Options, host: dict[str, Any]
) -> dict[str, Any]:
    """Return the metadata of a trace that has just begun, with its options."""
    limited = options.first or options.last is not None
    return {
        **process_recorder.first_meta(command, host),
        "ebbtide": ebbtide.__version__,
        "options": {
            "iterations": [options.first, options.last] if limited else None,
            "max_bytes": options.max_bytes,
            "poll_ms": options.poll_ms,
            "allocator_iterations": options.allocator_iterations,
            "transfers": options.transfers,
            "memory": options.memory,
            "on_demand": options.on_demand,
        },
        **({"warmup_iterations": 0} if options.first >= 2 else {}),
    }


def finish_recording(
    recording: OpenRecording, changes: dict[str, Any], first_iteration: int = 0
) -> RecordingResult:
    """Turn the spools into finished traces, as far as possible.

    Each thing that they lack becomes a warning.
    """
    output, warnings = recording.output, list(recording.sampler.notes)
    if not recording.is_in_place:
        return RecordingResult(
            [], [f"{output} was removed while the job ran: nothing was saved"]
        )
    failed = changes.get("exit") not in (None, {"code": 0})
    empty_reason = explain_empty_recording(
        output / SPOOL, recording.command, first_iteration, failed
    )
    changes = {
        "host": recording.sampler.host,
        "ended_wall_ns": time.time_ns(),
        "notes": list(warnings),
        **changes,
    }
    try:
        traces = finish(output, changes)
    except (OSError, TraceError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        try:
            traces = recovered_traces(output, read_meta(output))[:1]
        except (OSError, TraceError):
            return RecordingResult([], [*warnings, f"nothing was saved: {reason}"])
        if getattr(error, "errno", None) == errno.ENOSPC:
            # Everything else that the trace lacks follows from this.
            return RecordingResult(traces, [_NO_SPACE])
        warnings.append(
            f"the trace could not be finished ({reason}): it opens from its spools"
        )
    warnings += [
        note for trace in traces for note in trace.notes if note not in warnings
    ]
    if not traces[0].ranks:
        if recording.is_in_place:
            shutil.rmtree(output, ignore_errors=True)
        return RecordingResult([], [*warnings, f"nothing was recorded: {empty_reason}"])
    warnings += [warning for trace in traces if (warning := _no_iterations(trace))]
    warnings += [line for trace in traces if (line := _out_of_memory(trace))]
    return RecordingResult(traces, list(dict.fromkeys(warnings)))


def _no_iterations(trace: Trace) -> str | None:
    if any(trace.phases(rank)["iteration"].notna().any() for rank in trace.ranks):
        return None
    phases = {
        phase for rank in trace.ranks for phase in trace.phases(rank)["phase"].unique()
    }
    return explain_no_iterations(phases, [entry.stopped for entry in trace.meta.ranks])


def _out_of_memory(trace: Trace) -> str | None:
    """Return the line on ranks that ran out of memory, with the command that explains
    this."""
    ranks = [rank for rank in trace.ranks if trace.rank(rank).out_of_memory]
    if not ranks:
        return None
    subject = (
        "the job" if len(trace.ranks) == 1 else f"rank {', '.join(map(str, ranks))}"
    )
    return (
        f"{subject} ran out of memory: ebbtide memory {shlex.quote(str(trace.path))} "
        "--at oom"
    )


def write_nested_marker() -> None:
    """Tell an `ebbtide profile` around this one that the job is recorded here."""
    outer = os.environ.get(SPOOL_DIRECTORY)
    if outer:
        with contextlib.suppress(OSError):
            (Path(outer) / f"nested-{os.getpid()}").touch()


def explain_empty_recording(
    spools: Path,
    command: Sequence[str],
    first_iteration: int = 0,
    job_failed: bool = False,
) -> str:
    """Return why no process recorded itself, from the marker files that the agent
    writes as it starts."""
    if any(spools.glob("nested-*")):
        return "the job is recorded by another `ebbtide profile` inside this command"
    failed = sorted(spools.glob("failed-*"))
    if failed:
        return (
            "the agent could not attach "
            f"({failed[0].read_text(errors='replace')[:200]})"
        )
    if any(spools.glob("torch-*")) and first_iteration:
        return (
            f"the job did not get as far as iteration {first_iteration}, where "
            "--iterations begins"
        )
    if any(spools.glob("torch-*")) and job_failed:
        return "the job failed before any module ran forward with gradients"
    if any(spools.glob("torch-*")):
        return (
            "torch was imported, but no module ran forward with gradients and nothing "
            "ran backward, or the process had "
            "no file descriptor or disk space left to record with"
        )
    if any(spools.glob("python-*")):
        return "no Python process of this command imported torch"
    if not any("python" in Path(word).name or word.endswith(".py") for word in command):
        return "no Python process loaded the agent, if this command ran one at all"
    return (
        "no Python process loaded the agent (was Python started with -I, -E or -S, or "
        "with a PYTHONPATH of its own, "
        "from an environment where ebbtide is not installed?)"
    )


def finish(path: Path, changes: dict[str, Any]) -> list[Trace]:
    """Convert the spools of a recording into tables, then delete them.

    `changes` are keys to set in meta.json. Returns the trace, and one more for each
    further training of the command: RUN-2.ebb, RUN-3.ebb, ... Raises OSError where no
    space is left: the trace then still opens from its spools.
    """
    first, *others = recovered_traces(path, read_meta(path) | changes)
    for other in others:
        with new_trace(other.path):
            _write(other.path, other)
    try:
        finished = _write(path, first)
    except OSError:
        drop_ranks(path, first.ranks)
        raise
    drop_spools(path)
    return [finished, *others]


def _write(path: Path, trace: Trace) -> Trace:
    finished = {**trace.raw_meta, "state": "complete"}
    for rank in trace.ranks:
        write_rank(path, rank, {table: trace.table(rank, table) for table in TABLES})
    write_meta(path, finished)
    return Trace(path, finished, trace.table)
