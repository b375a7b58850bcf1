"""Memory of a device over the allocations of a job, measured and predicted, and the
difference of two such lines."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ebbtide.features.dryrun.session import DryRun, DryRunOptions
from ebbtide.profiler.memory_snapshot.allocations import pool_timeline
from ebbtide.profiler.memory_snapshot.reader import Snapshot, read_snapshot
from ebbtide.profiler.memory_snapshot.sandboxed_unpickler import ACTIONS

PHASES = ("forward", "backward", "update")
# Differences are shares of at least so many bytes: a job begins with none.
_LEAST_BYTES = 1 << 20


@dataclass(frozen=True)
class PhaseLine:
    """Requested bytes in one phase.

    Attributes:
        name: Name of the phase.
        requested: Bytes at its start, and after each allocation.
        sizes: Bytes of each allocation.
        end: Bytes at its end.
    """

    name: str
    requested: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    end: int

    @property
    def peak(self) -> int:
        return int(self.requested.max())


@dataclass(frozen=True)
class MemoryLine:
    """Memory of a device.

    Attributes:
        phases: Its phases in order.
        reserved: The largest bytes of its segments; None if they are not known.
        relative: Whether bytes count from those at the start of the first phase, which
            are not known.
    """

    phases: list[PhaseLine]
    reserved: int | None
    relative: bool = False


@dataclass(frozen=True)
class PhaseDifference:
    """A phase of two lines.

    Attributes:
        phase: Name of the phase.
        measured, predicted: The largest bytes.
        line_error: The largest difference after an allocation that both lines have, as
            a share of the measured bytes there; of the largest ones where bytes count
            from the start.
        matched: The share of the measured phase's allocated bytes that are in
            allocations that both have.
        end_error: The difference at the end of the phase, as a share of the same
            bytes.
    """

    phase: str
    measured: int
    predicted: int
    line_error: float
    matched: float
    end_error: float

    @property
    def peak_error(self) -> float:
        return (self.predicted - self.measured) / max(self.measured, _LEAST_BYTES)


def compare_lines(measured: MemoryLine, predicted: MemoryLine) -> list[PhaseDifference]:
    """Compare two lines, phase by phase, at the start and after each allocation that
    both have.

    These are the runs of equal sizes in the same order, the longest first.
    """
    assert [phase.name for phase in measured.phases] == [
        phase.name for phase in predicted.phases
    ]
    differences = []
    for real, dry in zip(measured.phases, predicted.phases, strict=True):
        matcher = SequenceMatcher(
            None, real.sizes.tolist(), dry.sizes.tolist(), autojunk=False
        )
        runs = [
            (run.a + np.arange(run.size), run.b + np.arange(run.size))
            for run in matcher.get_matching_blocks()
        ]
        ours, theirs = (np.concatenate([run[side] for run in runs]) for side in (0, 1))
        least = max(real.peak, _LEAST_BYTES) if measured.relative else _LEAST_BYTES
        at_real, at_dry = (
            np.concatenate([[0], positions + 1]).astype(int)
            for positions in (ours, theirs)
        )
        errors = np.abs(dry.requested[at_dry] - real.requested[at_real]) / np.maximum(
            real.requested[at_real], least
        )
        matched = (
            real.sizes[ours.astype(int)].sum() / max(int(real.sizes.sum()), 1)
            if len(real.sizes)
            else 1.0
        )
        end_error = (dry.end - real.end) / max(real.end, least)
        differences.append(
            PhaseDifference(
                real.name,
                real.peak,
                dry.peak,
                float(errors.max()),
                float(matched),
                end_error,
            )
        )
    return differences


def predicted_line(
    job: Callable[[], Iterator[str]], device_name: str, relative: bool = False
) -> MemoryLine:
    """Dry-run a job in this process.

    Args:
        job: Yields the name of each phase before it begins, and `end` after the last
            one.
        device_name: Name of the GPU.
        relative: Count the allocator's blocks from those at the start of the first
            phase, not requested bytes.
    """
    marks: list[tuple[str, int]] = []
    with DryRun(DryRunOptions(iterations=10**6, device_name=device_name)) as run:
        marks.extend((name, len(run.memory.timeline)) for name in job())
    requested = np.array(
        [row[2 if relative else 1] for row in run.memory.timeline], dtype=np.int64
    )
    requested = np.concatenate([[0], requested])
    if relative:
        requested = requested - requested[marks[0][1]]
    names, bounds = [name for name, _ in marks[:-1]], [bound for _, bound in marks]
    return MemoryLine(
        _phases(requested, names, bounds), run.memory.most_reserved_bytes, relative
    )


def snapshot_line(path: Path) -> MemoryLine:
    """Return the line of a snapshot of torch's allocator with one device."""
    snapshot = read_snapshot(lambda: path.open("rb"))
    events = np.concatenate([*snapshot.events[0].blocks(*ACTIONS)])
    signs = np.select(
        [
            events["action"] == ACTIONS["alloc"],
            events["action"] == ACTIONS["free_requested"],
        ],
        [1, -1],
        0,
    )
    rows = signs != 0
    changes = (signs * events["bytes"])[rows]
    requested = np.concatenate([[0], changes.cumsum()]) + int(
        pool_timeline(snapshot, 0, "requested").bytes[0]
    )
    allocated = (signs == 1)[rows]
    phase_of_event = np.where(
        allocated, _phase_codes(snapshot, events["stack"][rows]), -1
    )
    names, bounds = [], []
    for code, name in enumerate(PHASES):
        positions = np.flatnonzero(phase_of_event == code)
        if len(positions):
            names.append(name)
            bounds.append(int(positions[0]) if bounds else 0)
    reserved = int(pool_timeline(snapshot, 0, "reserved").bytes.max())
    return MemoryLine(_phases(requested, names, [*bounds, len(changes)]), reserved)


def _phase_codes(
    snapshot: Snapshot, stacks: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Return the position in PHASES of each stack; torch names autograd's thread in the
    first line."""
    codes = []
    for text in snapshot.stacks:
        lines = text.splitlines()
        if any(line.startswith("step (") for line in lines):
            codes.append(2)
        else:
            codes.append(
                int(
                    text.startswith("autograd engine")
                    or any("_make_grads (" in line for line in lines)
                )
            )
    return np.array([*codes, 0], dtype=np.int64)[stacks]


def profiler_line(path: Path, step: str) -> MemoryLine:
    """Return the line of one step of a torch.profiler trace with memory events of one
    GPU, from 0 at its start."""
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    window = next(event for event in events if event.get("name") == step)
    start, end = window["ts"], window["ts"] + window["dur"]
    inside = [event for event in events if start <= event.get("ts", -1) < end]
    changes = sorted(
        (event["ts"], event["args"]["Bytes"])
        for event in inside
        if event.get("name") == "[memory]" and event["args"]["Device Type"] == 1
    )
    starts = [
        start,
        min(event["ts"] for event in inside if "Backward" in str(event.get("name"))),
        min(
            event["ts"]
            for event in inside
            if str(event.get("name")).startswith("Optimizer.step")
        ),
    ]
    times = np.array([time for time, _ in changes])
    requested = np.concatenate(
        [[0], np.array([size for _, size in changes], dtype=np.int64).cumsum()]
    )
    bounds = [*(int(bound) for bound in np.searchsorted(times, starts)), len(changes)]
    return MemoryLine(_phases(requested, list(PHASES), bounds), None, relative=True)


def _phases(
    requested: npt.NDArray[np.int64], names: list[str], bounds: list[int]
) -> list[PhaseLine]:
    """Cut bytes after each change (the first: before all of them) at positions of
    changes."""
    phases = []
    for name, low, high in zip(names, bounds[:-1], bounds[1:], strict=True):
        inside = requested[low : high + 1]
        changes = np.diff(inside)
        allocations = np.flatnonzero(changes > 0)
        requested_after = inside[np.concatenate([[0], allocations + 1])]
        phases.append(
            PhaseLine(name, requested_after, changes[allocations], int(inside[-1]))
        )
    return phases
