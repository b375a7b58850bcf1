"""Activity of the GPU of one rank, per phase and over the whole trace, by cause, kernel
and collective."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ebbtide.analysis.dataframes import TabularResult
from ebbtide.analysis.metrics.activity.busy_time import (
    all_work,
    busy_time,
    main_kernels,
    main_work,
)
from ebbtide.analysis.metrics.activity.collectives import (
    CollectiveSkew,
    collective_skew,
)
from ebbtide.analysis.metrics.activity.phase_activity import (
    COLUMNS,
    phase_times,
    recorded_iterations,
    time_without_compute,
)
from ebbtide.analysis.metrics.devices import main_device
from ebbtide.analysis.metrics.iterations import intervals, steady_iterations
from ebbtide.analysis.metrics.missing import NO_KERNELS, no_iterations
from ebbtide.analysis.metrics.substeps.operations import without_gradients_ms
from ebbtide.analysis.timeseries.statistics import median_or_none
from ebbtide.analysis.timeseries.step_functions import (
    Ints,
    difference,
    length,
    union_length,
)
from ebbtide.phases import ITERATION_PARTS
from ebbtide.profiler.trace import Trace

_MAX_KERNELS = 50
_TIMED_KINDS = ("compute", "communication")


@dataclass(frozen=True)
class KernelTime:
    """All kernels of one name, or of one operator, on a rank's first device over the
    whole trace."""

    # Name of the kernel or of the operator; None: its operator is not known.
    name: str | None
    kind: str  # `compute` or `communication`.
    count: int  # Number of runs.
    time_ms: float  # Sum of their times.
    mean_us: float  # Mean time of one run.
    min_us: float
    median_us: float
    max_us: float
    share: float  # `time_ms` as a share of the sum over all kernels.


def kernel_times(trace: Trace, rank: int, label: str, count: int) -> list[KernelTime]:
    """Return the `count` kernels with most time by `name` or `operator`, the largest
    first; empty if unknown."""
    rows = trace.columns(rank, "kernels")
    if busy_time(trace, rank) is None or not rows.recorded(label).any():
        return []
    own = rows.equal("device", main_device(trace, rank)) & rows.matches(
        "kind", _TIMED_KINDS.__contains__
    )
    (names, texts), (kinds, kind_texts) = rows.codes(label), rows.codes("kind")
    groups = names[own].astype(np.int64) * len(kind_texts) + kinds[own]
    lengths = (rows.ints("end_ns") - rows.ints("start_ns"))[own]
    order = np.lexsort((lengths, groups))
    lengths, total, times = lengths[order], int(lengths.sum()), []
    present, first = np.unique(groups[order], return_index=True)
    ends = np.append(first[1:], len(lengths))
    for group in np.argsort(-np.add.reduceat(lengths, first), kind="stable")[
        :count
    ].tolist():
        name, kind = divmod(int(present[group]), len(kind_texts))
        runs = lengths[first[group] : ends[group]]
        time = int(runs.sum())
        times.append(
            KernelTime(
                name=texts[name] if name >= 0 else None,
                kind=kind_texts[kind],
                count=len(runs),
                time_ms=time / 1e6,
                mean_us=time / len(runs) / 1e3,
                min_us=int(runs[0]) / 1e3,
                median_us=float(np.median(runs)) / 1e3,
                max_us=int(runs[-1]) / 1e3,
                share=time / total if total else 0.0,
            )
        )
    return sorted(
        times, key=lambda kernel: (-kernel.time_ms, kernel.name or "", kernel.kind)
    )[:count]


def kernels_ms(trace: Trace, rank: int) -> dict[str, dict[str, float]]:
    """Return mean milliseconds per steady iteration by `name` and by `operator`; empty
    if unknown."""
    usable = set(steady_iterations(trace).numbers) & set(
        recorded_iterations(trace, rank).tolist()
    )
    spans = intervals(trace, rank).spans
    spans = spans[spans["iteration"].isin(usable)]
    rows = main_kernels(trace, rank)
    position = np.searchsorted(spans["start_ns"], rows["start_ns"], side="right") - 1
    inside = (
        rows["start_ns"]
        < np.append(spans["end_ns"].to_numpy(np.int64), np.iinfo(np.int64).min)[
            position
        ]
    )
    rows = rows[inside]
    lengths = rows["end_ns"] - rows["start_ns"]
    times = {
        label: lengths.groupby(rows[label], observed=True).sum()
        for label in ("name", "operator")
    }
    return {
        label: {str(name): ns / len(spans) / 1e6 for name, ns in own.items()}
        for label, own in times.items()
    }


@dataclass(frozen=True)
class KernelLaunches:
    """Launches of compute kernels on the first device of a rank, over the whole trace.

    A kernel of a CUDA graph was launched by the launch of the graph."""

    count: int  # Number of compute kernels whose launch was recorded.
    # Median of the times from the start of the launching call to the start of the
    # kernel.
    median_delay_us: float
    p95_delay_us: float  # Their 95th percentile, by linear interpolation.
    # Of these kernels: how many were launched before and had not begun, on any stream;
    # median over launches.
    median_queued: float
    p95_queued: float  # Its 95th percentile.


def kernel_launches(trace: Trace, rank: int) -> KernelLaunches | None:
    """Measure the launches of compute kernels; None where no launch was recorded."""
    work = main_work(trace, rank, "kernels")
    work = work.only((work.kinds == "compute") & work.launched)
    if not len(work.starts):
        return None
    starts, launches = np.sort(work.starts), np.sort(work.launches)
    delays = (work.starts - work.launches) / 1e3
    # Clocks of host and device may differ by microseconds: a kernel then seems to begin
    # before its launch.
    queued = np.maximum(
        np.searchsorted(launches, launches)
        - np.searchsorted(starts, launches, side="right"),
        0,
    )
    delay, depth = np.percentile(delays, [50, 95]), np.percentile(queued, [50, 95])
    return KernelLaunches(
        len(starts), float(delay[0]), float(delay[1]), float(depth[0]), float(depth[1])
    )


def queue_length(trace: Trace, rank: int) -> tuple[Ints, Ints]:
    """Return times, ns, and from each on the number of queued kernels and copies.

    Queued ones were launched on the first device and have not begun. It is empty where
    launches were not recorded.
    """
    work = all_work(trace, rank)
    work = work.only(work.launched & (work.starts > work.launches))
    edges, position = np.unique(
        np.concatenate([work.launches, work.starts]), return_inverse=True
    )
    changes = np.bincount(
        position, np.repeat([1.0, -1.0], len(work.starts)), len(edges)
    )
    return edges, np.cumsum(changes).astype(np.int64)


@dataclass(frozen=True)
class StreamTime:
    """Time of one stream of the first device, over the whole trace."""

    stream: int | None  # None: not recorded.
    count: int  # Number of kernels, copies and memsets.
    busy_ms: float  # Time in which it runs anything.
    idle_ms: float  # The rest of the span of the device.


def stream_times(trace: Trace, rank: int) -> list[StreamTime]:
    """Measure each stream, the busiest first; empty where kernels were not recorded."""
    busy = busy_time(trace, rank)
    if busy is None:
        return []
    work = all_work(trace, rank)
    work = work.only(np.argsort(work.streams, kind="stable"))
    span, streams = length(busy.recorded), []
    numbers, first = np.unique(work.streams, return_index=True)
    for number, start, end in zip(
        numbers.tolist(), first, np.append(first[1:], len(work.streams)), strict=True
    ):
        used = union_length(work.starts[start:end], work.ends[start:end])
        stream = number if number >= 0 else None
        streams.append(
            StreamTime(stream, int(end - start), used / 1e6, (span - used) / 1e6)
        )
    return sorted(streams, key=lambda entry: -entry.busy_ms)


@dataclass(frozen=True)
class PhaseActivity:
    """GPU time of a phase: medians of the steady iterations, None if not recorded.

    A kernel belongs to the phase that launched it. Compute, communication and copies
    may overlap."""

    phase: str  # The phase, or `other`.
    compute_ms: float | None  # Time in which compute kernels of the phase run.
    communication_ms: float | None  # Time in which its collectives run.
    copy_ms: float | None  # Time of the phase in which copies run.
    idle_ms: float | None  # Time of the phase in which nothing runs.


@dataclass(frozen=True)
class TotalActivity:
    """GPU time of the whole trace; None where kernels were not recorded."""

    # From the start of the first to the end of the last activity (kernel, copy,
    # memset), without the pauses of a recording in slices.
    span_ms: float | None = None
    compute_ms: float | None = None  # Time in which compute kernels run.
    communication_ms: float | None = None  # Time in which collectives run.
    copy_ms: float | None = None  # Time in which copies run.
    idle_ms: float | None = None  # Time of the span in which nothing runs.
    # Share of `communication_ms` in which compute kernels run as well; None without
    # communication.
    communication_overlap_share: float | None = None


@dataclass(frozen=True, repr=False)
class GpuActivity(TabularResult, table="phases"):
    """Activity of the first device of a rank.

    Attributes:
        rank: The rank; None in a trace without ranks.
        phases: An entry per phase, and `other`; empty without iterations.
        total: The whole trace.
        without_compute: Milliseconds of the span in which no compute kernel runs, by
            cause (see `time_without_compute`); empty where kernels were not recorded.
        launches: Launches of compute kernels; None where they were not recorded.
        kernels: The kernels with most time.
        operators: The operators that launched the kernels with most time; empty where
            they are not known.
        streams: Busy and idle time of each stream, the busiest first.
        collectives: Waiting of the ranks for each other; None unless several ranks
            recorded the same collectives.
        missing: Lines on what is missing, and how to record it.
        without_gradients_ms: Part of `other` on the rank: forwards without gradients;
            None where none were recorded.
    """

    rank: int | None
    phases: list[PhaseActivity]
    total: TotalActivity
    without_compute: dict[str, float]
    launches: KernelLaunches | None
    kernels: list[KernelTime]
    operators: list[KernelTime]
    streams: list[StreamTime]
    collectives: CollectiveSkew | None
    missing: list[str]
    without_gradients_ms: float | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the object that `ebbtide summary --by activity --json` prints."""
        printed = asdict(self)
        printed["without_compute"] = {
            f"{cause}_ms": ms for cause, ms in self.without_compute.items()
        }
        return printed


def gpu_activity(trace: Trace, rank: int | None = None) -> GpuActivity:
    """Measure the first device of a rank; None: of the first rank. Raises TraceError
    for an unknown rank."""
    if rank is None:
        rank = next(iter(trace.ranks), None)
    if rank is None:
        return GpuActivity(
            None,
            [],
            TotalActivity(),
            {},
            None,
            [],
            [],
            [],
            None,
            [no_iterations(trace), NO_KERNELS],
        )
    trace.rank(rank)
    has_iterations = bool(steady_iterations(trace).numbers)
    missing = [] if has_iterations else [no_iterations(trace)]
    if busy_time(trace, rank) is None:
        missing.append(NO_KERNELS)
    causes = {
        cause: length(time) / 1e6
        for cause, time in time_without_compute(trace, rank).items()
    }
    return GpuActivity(
        rank=rank,
        phases=_phases(trace, rank) if has_iterations else [],
        total=_total(trace, rank),
        without_compute=causes,
        launches=kernel_launches(trace, rank),
        kernels=kernel_times(trace, rank, "name", _MAX_KERNELS),
        operators=kernel_times(trace, rank, "operator", _MAX_KERNELS),
        streams=stream_times(trace, rank),
        collectives=collective_skew(trace),
        missing=missing,
        without_gradients_ms=without_gradients_ms(trace, rank),
    )


def _phases(trace: Trace, rank: int) -> list[PhaseActivity]:
    times = phase_times(trace, rank)
    if times is None:
        return [
            PhaseActivity(phase, None, None, None, None) for phase in ITERATION_PARTS
        ]
    steady = np.isin(times.numbers, steady_iterations(trace).numbers)
    kinds = [
        COLUMNS.index(kind) for kind in ("compute", "communication", "copy", "idle")
    ]
    entries = []
    for part, phase in enumerate(ITERATION_PARTS):
        # An iteration without a phase that others have spent no time in it.
        counted = steady & times.has_phase[steady, part].any()
        entries.append(
            PhaseActivity(
                phase,
                *(median_or_none(times.ms[counted, part, kind]) for kind in kinds),
            )
        )
    return entries


def _total(trace: Trace, rank: int) -> TotalActivity:
    busy = busy_time(trace, rank)
    if busy is None:
        return TotalActivity()
    span = length(busy.recorded)
    communication = length(busy.communication)
    exposed = length(difference(busy.communication, busy.compute))
    return TotalActivity(
        span_ms=span / 1e6,
        compute_ms=length(busy.compute) / 1e6,
        communication_ms=communication / 1e6,
        copy_ms=length(busy.copy) / 1e6,
        idle_ms=(span - length(busy.all)) / 1e6,
        communication_overlap_share=1 - exposed / communication
        if communication
        else None,
    )
