"""The critical path of an iteration: the chain of work, calls and waits that ends with
the iteration and takes all of its time."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ebbtide.analysis.metrics.activity.activity import GpuActivity
from ebbtide.analysis.metrics.activity.busy_time import busy_time
from ebbtide.analysis.metrics.activity.collectives import common_collectives
from ebbtide.analysis.metrics.activity.phase_activity import recorded_iterations
from ebbtide.analysis.metrics.cache import once_per_trace
from ebbtide.analysis.metrics.critical_path.dependencies import (
    UNKNOWN,
    RankNodes,
    Step,
    add_joins,
    add_rank,
)
from ebbtide.analysis.metrics.critical_path.graph import BuiltGraph, GraphBuilder
from ebbtide.analysis.metrics.iterations import intervals, steady_iterations
from ebbtide.analysis.timeseries.step_functions import Ints
from ebbtide.phases import ITERATION_PARTS
from ebbtide.profiler.trace import Trace

# With more ranks, a path stays on its own: their collectives would have to be read.
MAX_RANKS = 16
BETWEEN_KERNELS, OTHER_STREAM, UNKNOWN_WAIT = (
    "between kernels",
    "for another stream",
    "not explained",
)
_KINDS = {
    "compute": "kernel",
    "communication": "collective",
    "copy": "copy",
    "memset": "kernel",
}


@dataclass(frozen=True)
class Segment:
    """A part of the path without interruption."""

    rank: int
    start_ns: int  # On the clock of this rank.
    end_ns: int
    kind: str  # `kernel`, `copy`, `collective`, `launch`, `wait` or `host`.
    name: str
    # The phase, or `other`, that it belongs to; None outside of iterations.
    part: str | None


@dataclass(frozen=True)
class PathPart:
    """All segments of one kind and name."""

    kind: str
    name: str
    count: int
    ms: float


@dataclass(frozen=True)
class CriticalPath:
    """The critical path of one iteration of a rank."""

    iteration: int  # The steady iteration with the median time.
    length_ms: float  # Its time, which the segments cover without a gap.
    parts: list[PathPart]  # Time by kind and name, the largest first.
    phases: dict[str, float]  # Milliseconds by phase, and of `other`.
    # Milliseconds by rank: a path leads to the last rank of a collective.
    ranks: dict[int, float]
    segments: list[Segment]

    def as_json(self) -> dict[str, Any]:
        """Return the object `critical_path` of a summary's JSON.

        The command is `ebbtide summary --by activity --critical-path --json`.
        """
        return {
            "iteration": self.iteration,
            "length_ms": self.length_ms,
            "parts": [asdict(part) for part in self.parts],
            "phases": [{"phase": phase, "ms": ms} for phase, ms in self.phases.items()],
            "ranks": [{"rank": rank, "ms": ms} for rank, ms in self.ranks.items()],
        }

    def kind_ms(self, *kinds: str) -> float:
        """Return the time of some kinds."""
        return sum(part.ms for part in self.parts if part.kind in kinds)

    @property
    def device_ms(self) -> float:
        """Time of work on the device."""
        return self.kind_ms("kernel", "collective", "copy")


@dataclass(frozen=True)
class RankPath:
    """Activity of a rank with its critical path; None without kernels or iterations."""

    activity: GpuActivity
    path: CriticalPath | None

    def as_json(self) -> dict[str, Any]:
        """Return the object of a summary's JSON with critical paths.

        The command is `ebbtide summary --by activity --critical-path --json`.
        """
        return {
            **self.activity.as_json(),
            "critical_path": None if self.path is None else self.path.as_json(),
        }


@once_per_trace
def critical_path(trace: Trace, rank: int) -> CriticalPath | None:
    """Return the critical path of a rank's median steady iteration.

    Return None without kernels or iterations.
    """
    if busy_time(trace, rank) is None:
        return None
    times = intervals(trace, rank)
    usable = set(steady_iterations(trace).numbers) & set(
        recorded_iterations(trace, rank).tolist()
    )
    positions = [
        index for index, number in enumerate(times.numbers.tolist()) if number in usable
    ]
    if not positions:
        return None
    positions.sort(key=lambda index: int(times.ends[index] - times.starts[index]))
    median = positions[(len(positions) - 1) // 2]
    start, end = int(times.starts[median]), int(times.ends[median])
    segments = path_segments(trace, rank, start, end)
    sums: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for segment in segments:
        sums[segment.kind, segment.name].append(segment.end_ns - segment.start_ns)
    parts = [
        PathPart(kind, name, len(lengths), sum(lengths) / 1e6)
        for (kind, name), lengths in sums.items()
    ]
    parts.sort(key=lambda part: -part.ms)
    return CriticalPath(
        iteration=int(times.numbers[median]),
        length_ms=(end - start) / 1e6,
        parts=parts,
        phases={
            part: ms
            for part in ITERATION_PARTS
            if (ms := _ms(s for s in segments if s.part == part))
        },
        ranks={
            r: _ms(s for s in segments if s.rank == r)
            for r in sorted({s.rank for s in segments})
        },
        segments=segments,
    )


def _ms(segments: Iterable[Segment]) -> float:
    return sum(segment.end_ns - segment.start_ns for segment in segments) / 1e6


def path_segments(trace: Trace, rank: int, start_ns: int, end_ns: int) -> list[Segment]:
    """Return the critical path from `start_ns` to `end_ns`, on the clock of a rank."""
    built, of_ranks = path_graph(trace, rank, start_ns, end_ns)
    namer = _Namer(trace, of_ranks)
    segments = []
    for edge in built.graph.longest_path():
        source, target = int(built.graph.sources[edge]), int(built.graph.targets[edge])
        begin, end = int(built.times[source]), int(built.times[target])
        if end > begin:
            nodes = int(built.order[source]), int(built.order[target])
            segments.append(
                namer.segment(Step(int(built.kinds[edge])), *nodes, begin, end)
            )
    return segments


def path_graph(
    trace: Trace, rank: int, start_ns: int, end_ns: int
) -> tuple[BuiltGraph, list[RankNodes]]:
    """Return the graph of the time from `start_ns` to `end_ns` on the clock of a rank.

    The rank stands first.
    """
    builder = GraphBuilder(start_ns, end_ns)
    shifts, groups = _joined_ranks(trace, rank)
    of_ranks = {
        number: add_rank(builder, trace, number, shift)
        for number, shift in shifts.items()
    }
    for group in groups:
        add_joins(builder, [(of_ranks[number], rows) for number, rows in group.items()])
    own = of_ranks[rank]
    ends = np.concatenate([own.work_end, own.call_end])
    return builder.build(Step.START, ends), list(of_ranks.values())


def _joined_ranks(
    trace: Trace, rank: int
) -> tuple[dict[int, int], list[dict[int, Ints]]]:
    """Return the ranks that a path may lead to, and their common collectives.

    Each rank has what to add to its times; the collectives are rows for each group of
    ranks. A collective ends on all ranks at once, which aligns the clocks of hosts.
    """
    if not 1 < len(trace.ranks) <= MAX_RANKS:
        return {rank: 0}, []
    common = [
        group for group in common_collectives(trace, trace.ranks) if rank in group
    ]
    shifts = {rank: 0}
    for group in common:
        own_ends = group[rank]["end_ns"].to_numpy(np.int64)
        for number, rows in group.items():
            shifts.setdefault(
                number, int(np.median(own_ends - rows["end_ns"].to_numpy(np.int64)))
            )
    return shifts, [
        {number: rows.index.to_numpy(np.int64) for number, rows in group.items()}
        for group in common
    ]


class _Namer:
    """Names the edges of a path by the work or call that their nodes belong to."""

    def __init__(self, trace: Trace, of_ranks: list[RankNodes]) -> None:
        self._first = of_ranks[0]
        self._owners: dict[int, tuple[RankNodes, Any]] = {}
        self._ranges: dict[int, tuple[Ints, Ints, Any]] = {}
        for nodes in of_ranks:
            # Starts, ends and names of the ranges that the job named, without the
            # profiler's own.
            rows = trace.columns(nodes.rank, "annotations")
            own = ~rows.matches("name", lambda name: name.startswith("ProfilerStep"))
            self._ranges[nodes.rank] = (
                rows.ints("start_ns")[own],
                rows.ints("end_ns")[own],
                rows.texts("name")[own],
            )
            work, calls = (
                list(rows.itertuples(index=False)) for rows in (nodes.work, nodes.calls)
            )
            for numbers in (nodes.work_start, nodes.work_join, nodes.work_end):
                self._owners.update(
                    zip(numbers.tolist(), ((nodes, row) for row in work), strict=True)
                )
            for numbers in (nodes.call_start, nodes.call_end):
                self._owners.update(
                    zip(numbers.tolist(), ((nodes, row) for row in calls), strict=True)
                )

    def segment(
        self, step: Step, source: int, target: int, start: int, end: int
    ) -> Segment:
        """Return the segment of an edge from one node to another."""
        before = self._owners.get(source, (self._first, None))
        nodes, row = self._owners.get(target, before)
        start, end = start - nodes.shift_ns, end - nodes.shift_ns
        middle = (start + end) // 2
        is_call = hasattr(row, "thread")
        if row is None or is_call:
            part = nodes.host_part(middle)
        else:
            part = (
                nodes.device_part(middle)
                if row.launch_ns == UNKNOWN
                else nodes.host_part(row.launch_ns)
            )
        kind, name = "wait", UNKNOWN_WAIT
        if step == Step.WORK:
            kind, name = _KINDS[row.kind], row.name
        elif step == Step.LAUNCH:
            kind, name = "launch", before[1].name
        elif step in (Step.CALL, Step.SYNCHRONIZATION):
            is_wait = step == Step.SYNCHRONIZATION or "Synchronize" in row.name
            kind, name = (
                "wait" if is_wait else "launch" if row.launches else "host",
                row.name,
            )
        elif step == Step.HOST or (step == Step.START and is_call):
            # The innermost range that the job named, else the phase.
            starts, ends, names = self._ranges[nodes.rank]
            around = np.flatnonzero((starts <= middle) & (ends > middle))
            kind, name = (
                "host",
                str(names[around[-1]]) if len(around) else part or UNKNOWN_WAIT,
            )
        elif step != Step.START:
            name = {Step.STREAM: BETWEEN_KERNELS, Step.OTHER_STREAM: OTHER_STREAM}.get(
                step, f"for rank {before[0].rank}"
            )
        return Segment(nodes.rank, start, end, kind, name, part)
