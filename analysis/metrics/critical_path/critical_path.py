"""The critical path of an iteration: the chain of work, calls and waits that ends with it and takes all of its time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ebbtide.analysis.metrics.activity.busy_time import busy_time
from ebbtide.analysis.metrics.activity.collectives import common_collectives
from ebbtide.analysis.metrics.activity.phase_activity import recorded_iterations
from ebbtide.analysis.metrics.cache import once_per_trace
from ebbtide.analysis.metrics.critical_path.dependencies import UNKNOWN, RankNodes, Step, add_rank, host_parts
from ebbtide.analysis.metrics.critical_path.graph import GraphBuilder
from ebbtide.analysis.metrics.iterations import intervals, steady_iterations
from ebbtide.analysis.timeseries.step_functions import Ints
from ebbtide.phases import ITERATION_PARTS
from ebbtide.profiler.trace import Trace

# With more ranks, a path stays on its own: their collectives would have to be read.
MAX_RANKS = 16
BETWEEN_KERNELS, OTHER_STREAM, UNKNOWN_WAIT = "between kernels", "for another stream", "not explained"
_KINDS = {"compute": "kernel", "communication": "collective", "copy": "copy", "memset": "kernel"}
# The kinds that are work on the device.
DEVICE_KINDS = ("kernel", "collective", "copy")


@dataclass(frozen=True)
class Segment:
    """A part of the path without interruption."""

    rank: int
    start_ns: int  # On the clock of this rank.
    end_ns: int
    kind: str  # `kernel`, `copy`, `collective`, `launch`, `wait` or `host`.
    name: str
    part: str | None  # The phase, or `other`, that it belongs to; None outside of iterations.


@dataclass(frozen=True)
class PathPart:
    """All segments of one kind and name."""

    kind: str
    name: str
    count: int
    ms: float


@dataclass(frozen=True)
class CriticalPath:
    """The critical path of one iteration of a rank.

    Attributes:
        iteration: The steady iteration with the median time.
        length_ms: Its time, which the segments cover without a gap.
        parts: Time by kind and name, the largest first.
        phases: Milliseconds by phase, and of `other`.
        ranks: Milliseconds by rank: a path leads to the last rank of a collective.
    """

    iteration: int
    length_ms: float
    parts: list[PathPart]
    phases: dict[str, float]
    ranks: dict[int, float]
    segments: list[Segment]

    def as_json(self) -> dict[str, Any]:
        """Return the object `critical_path` of `ebbtide summary --by activity --critical-path --json`."""
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


@once_per_trace
def critical_path(trace: Trace, rank: int) -> CriticalPath | None:
    """Return the critical path of the steady iteration of a rank with the median time; None without kernels or
    iterations."""
    if busy_time(trace, rank) is None:
        return None
    times = intervals(trace, rank)
    usable = set(steady_iterations(trace).numbers) & set(recorded_iterations(trace, rank).tolist())
    positions = [index for index, number in enumerate(times.numbers.tolist()) if number in usable]
    if not positions:
        return None
    positions.sort(key=lambda index: int(times.ends[index] - times.starts[index]))
    median = positions[(len(positions) - 1) // 2]
    start, end = int(times.starts[median]), int(times.ends[median])
    segments = path_segments(trace, rank, start, end)
    sums: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for segment in segments:
        sums[segment.kind, segment.name].append(segment.end_ns - segment.start_ns)
    parts = [PathPart(kind, name, len(lengths), sum(lengths) / 1e6) for (kind, name), lengths in sums.items()]
    parts.sort(key=lambda part: -part.ms)
    return CriticalPath(
        iteration=int(times.numbers[median]),
        length_ms=(end - start) / 1e6,
        parts=parts,
        phases={part: ms for part in ITERATION_PARTS if (ms := _sum(segments, lambda s, p=part: s.part == p))},
        ranks={r: _sum(segments, lambda s, r=r: s.rank == r) for r in sorted({s.rank for s in segments})},
        segments=segments,
    )


def _sum(segments: Sequence[Segment], selects: Callable[[Segment], bool]) -> float:
    return sum(segment.end_ns - segment.start_ns for segment in segments if selects(segment)) / 1e6


def path_segments(trace: Trace, rank: int, start_ns: int, end_ns: int) -> list[Segment]:
    """Return the critical path that ends at `end_ns`, on the clock of a rank: it covers the time from `start_ns` on."""
    builder = GraphBuilder(start_ns, end_ns)
    shifts, groups = _joined_ranks(trace, rank)
    of_ranks = {number: add_rank(builder, trace, number, shift) for number, shift in shifts.items()}
    for group in groups:
        _add_joins(builder, {number: of_ranks[number] for number in group}, group)
    graph, order, times, kinds = builder.build(Step.START)
    items = _Items(trace, rank, shifts, list(of_ranks.values()), len(order))
    segments = []
    for edge in graph.longest_path():
        begin, end = int(times[graph.sources[edge]]), int(times[graph.targets[edge]])
        if end > begin:
            source, target = int(order[graph.sources[edge]]), int(order[graph.targets[edge]])
            segments.append(items.segment(Step(int(kinds[edge])), source, target, begin, end))
    return segments


def _joined_ranks(trace: Trace, rank: int) -> tuple[dict[int, int], list[dict[int, Ints]]]:
    """Return the ranks that a path may lead to with what to add to their times, and for each group of ranks the rows of
    their common collectives. A collective ends on all ranks at once, which aligns the clocks of hosts."""
    if not 1 < len(trace.ranks) <= MAX_RANKS:
        return {rank: 0}, []
    common = [group for group in common_collectives(trace, trace.ranks) if rank in group]
    shifts = {rank: 0}
    for group in common:
        own_ends = group[rank]["end_ns"].to_numpy(np.int64)
        for number, rows in group.items():
            shifts.setdefault(number, int(np.median(own_ends - rows["end_ns"].to_numpy(np.int64))))
    return shifts, [{number: rows.index.to_numpy(np.int64) for number, rows in group.items()} for group in common]


def _add_joins(builder: GraphBuilder, of_ranks: dict[int, RankNodes], rows: dict[int, Ints]) -> None:
    """Move the joins of collectives to the time at which the last rank has begun them."""
    places = {}
    for number, nodes in of_ranks.items():
        position = np.full(int(max(rows[number].max(), nodes.work["row"].max(initial=0) if len(nodes.work) else 0)) + 1, UNKNOWN)
        in_table = nodes.work["row"].to_numpy(np.int64)
        position[in_table[in_table >= 0]] = np.flatnonzero(in_table >= 0)
        places[number] = position[rows[number]]
    present = np.all([place >= 0 for place in places.values()], axis=0)
    chosen = {number: place[present] for number, place in places.items()}
    starts = np.stack([nodes.work["start_ns"].to_numpy(np.int64)[chosen[n]] for n, nodes in of_ranks.items()])
    last = starts.max(axis=0)
    for number, nodes in of_ranks.items():
        joins = nodes.work_join[chosen[number]]
        builder.move(joins, np.minimum(last, nodes.work["end_ns"].to_numpy(np.int64)[chosen[number]]))
        for other, sources in of_ranks.items():
            if other != number:
                builder.edges(sources.work_start[chosen[other]], joins, Step.RANK)


class _Items:
    """Names the edges of a path by the work or call that their nodes belong to."""

    def __init__(
        self, trace: Trace, rank: int, shifts: dict[int, int], of_ranks: list[RankNodes], count: int
    ) -> None:
        self._trace, self._rank, self._shifts, self._of_ranks = trace, rank, shifts, of_ranks
        self._owner = np.full((count, 3), UNKNOWN)  # Position of the rank, whether it is a call, row.
        for number, nodes in enumerate(of_ranks):
            for is_call, numbers in enumerate(
                ((nodes.work_start, nodes.work_join, nodes.work_end), (nodes.call_start, nodes.call_end))
            ):
                for part in numbers:
                    self._owner[part] = np.column_stack([np.full(len(part), number), np.full(len(part), is_call), np.arange(len(part))])

    def segment(self, step: Step, source: int, target: int, start: int, end: int) -> Segment:
        """Return the segment of an edge from one node to another."""
        owner = self._owner[target if self._owner[target][0] >= 0 else source]
        before = self._owner[source]
        if owner[0] < 0:
            return Segment(self._rank, start, end, "wait", UNKNOWN_WAIT, None)
        nodes = self._of_ranks[owner[0]]
        shift = self._shifts[nodes.rank]
        row = (nodes.calls if owner[1] else nodes.work).iloc[owner[2]]
        launch = None if owner[1] or row["launch_ns"] == UNKNOWN else row["launch_ns"]
        times = np.array([start - shift if launch is None else launch])
        part = int(host_parts(self._trace, nodes.rank, times, device_times=launch is None and not owner[1])[0])
        kind, name = self._kind_and_name(step, row, bool(owner[1]), nodes, before, part, start - shift)
        return Segment(
            nodes.rank, start - shift, end - shift, kind, name, ITERATION_PARTS[part] if part >= 0 else None
        )

    def _kind_and_name(
        self, step: Step, row: Any, is_call: bool, nodes: RankNodes, before: Ints, part: int, at_ns: int
    ) -> tuple[str, str]:
        if step == Step.WORK:
            return _KINDS[row["kind"]], str(row["name"])
        if step == Step.LAUNCH:
            return "launch", str(nodes.calls.iloc[before[2]]["name"])
        if step in (Step.CALL, Step.SYNCHRONIZATION):
            is_wait = step == Step.SYNCHRONIZATION or "Synchronize" in row["name"]
            return ("wait" if is_wait else "launch" if row["launches"] else "host"), str(row["name"])
        if step == Step.HOST or (step == Step.START and is_call):
            return "host", self._host_name(nodes.rank, part, at_ns)
        if step == Step.STREAM:
            return "wait", BETWEEN_KERNELS
        if step == Step.OTHER_STREAM:
            return "wait", OTHER_STREAM
        return "wait", f"for rank {nodes.rank}" if step == Step.RANK else UNKNOWN_WAIT

    def _host_name(self, rank: int, part: int, at_ns: int) -> str:
        """Return the innermost range that the job named at a time; else the phase."""
        rows = self._trace.columns(rank, "annotations")
        around = (rows.ints("start_ns") <= at_ns) & (rows.ints("end_ns") > at_ns)
        around &= ~rows.matches("name", lambda name: name.startswith("ProfilerStep"))
        inside = np.flatnonzero(around)
        if len(inside):
            return str(rows.texts("name")[inside[int(np.argmax(rows.ints("start_ns")[inside]))]])
        return ITERATION_PARTS[part] if part >= 0 else UNKNOWN_WAIT
