"""Summarizes a trace: time, memory, link use and the state of the GPUs per phase."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

import numpy as np

from ebbtide.analysis.dataframes import TabularResult
from ebbtide.analysis.metrics.activity.busy_time import busy_time
from ebbtide.analysis.metrics.devices import (
    capacity_bytes,
    free_pool,
    peak_pool,
    pool_peaks,
)
from ebbtide.analysis.metrics.gpu_state import GpuFigure, gpu_state
from ebbtide.analysis.metrics.iteration_mean import (
    UnevenTimes,
    repeated_cycle,
    uneven_iterations,
)
from ebbtide.analysis.metrics.iterations import (
    IterationTable,
    median_ms,
    part_counts,
    slowest_times,
    steady_iterations,
)
from ebbtide.analysis.metrics.link_throughput import (
    DIRECTIONS,
    copied_iterations,
    moved_bytes,
)
from ebbtide.analysis.metrics.missing import (
    NO_GPU_STATE,
    no_link,
    on_demand_remarks,
    out_of_memory_remarks,
    partly_no_link,
)
from ebbtide.analysis.metrics.phases import phase_bytes, phase_peaks
from ebbtide.analysis.metrics.prediction import TimeRange, is_predicted, predicted_range
from ebbtide.analysis.metrics.ranks.comparison import (
    NOT_COMPARED,
    RankDifferences,
    rank_differences,
)
from ebbtide.analysis.metrics.ranks.scan import read_by_parts
from ebbtide.analysis.metrics.storage_use import StorageUse, storage_use
from ebbtide.analysis.metrics.substeps.operations import without_gradients_ms
from ebbtide.analysis.timeseries.statistics import median_or_none, sum_or_none
from ebbtide.analysis.timeseries.step_functions import Floats, length, union_length
from ebbtide.phases import ITERATION_PARTS
from ebbtide.profiler.trace import Trace
from ebbtide.units import NOT_KNOWN, ms_text


@dataclass(frozen=True)
class Totals:
    """Figures of a whole trace, its warm-up included; None if not recorded."""

    span_ms: float | None  # From its first to its last record.
    # Bytes moved to the device, summed over ranks, from copies or else from sampled
    # counters.
    h2d_bytes: int | None
    d2h_bytes: int | None  # Bytes moved to the host.
    # Least free memory of any rank (capacity - `Summary.free_pool`).
    min_free_bytes: int | None
    compute_ms: float | None  # Time in which compute kernels run, summed over ranks.
    communication_ms: float | None  # Time in which collectives run, summed over ranks.
    # Time in which copies run, summed over ranks with recorded kernels.
    copy_ms: float | None
    # Time between the first and the last activity of a GPU in which nothing runs on it,
    # summed over ranks.
    idle_ms: float | None


def whole_trace(trace: Trace) -> Totals:
    """Sum the figures of a trace."""
    span = trace.span_ns()
    busy = [
        times for rank in trace.ranks if (times := busy_time(trace, rank)) is not None
    ]
    return Totals(
        span_ms=None if span is None else (span[1] - span[0]) / 1e6,
        h2d_bytes=sum_or_none(moved_bytes(trace, rank, "h2d") for rank in trace.ranks),
        d2h_bytes=sum_or_none(moved_bytes(trace, rank, "d2h") for rank in trace.ranks),
        min_free_bytes=_min_free(trace),
        compute_ms=sum_or_none(length(times.compute) / 1e6 for times in busy),
        communication_ms=sum_or_none(
            length(times.communication) / 1e6 for times in busy
        ),
        copy_ms=sum_or_none(length(times.copy) / 1e6 for times in busy),
        idle_ms=sum_or_none(
            (length(times.recorded) - length(times.all)) / 1e6 for times in busy
        ),
    )


def _min_free(trace: Trace) -> int | None:
    pairs = [
        (capacity_bytes(trace, r), pool_peaks(trace, r).get(free_pool(trace) or ""))
        for r in trace.ranks
    ]
    sizes = [
        capacity - peak
        for capacity, peak in pairs
        if capacity is not None and peak is not None
    ]
    return max(min(sizes), 0) if sizes else None


@dataclass(frozen=True)
class PhaseSummary:
    """One phase over the steady iterations; None for figures that were not recorded."""

    phase: str  # The phase, or `other`.
    count: int  # How often it ran, each micro-step once.
    median_ms: float | None  # Median of its time per iteration, on the slowest rank.
    p95_ms: float | None  # 95th percentile of the same, with linear interpolation.
    # Peak of `MemorySummary.pool`, median over iterations and ranks.
    peak_bytes: int | None
    # Least free memory (capacity - `Summary.free_pool`), median over iterations and
    # ranks.
    min_free_bytes: int | None
    # Bytes moved to the device per iteration, median over iterations and ranks.
    h2d_bytes: int | None
    # Bytes moved to the host per iteration, median over iterations and ranks.
    d2h_bytes: int | None
    # `median_ms` as a share of the sum over phases: shares add up to 1, medians need
    # not add up to `Summary.iteration_ms`.
    share: float | None
    # `low_ms`, `high_ms`: of a predicted trace, `median_ms` under fast and under slow
    # assumptions.
    low_ms: float | None = None
    high_ms: float | None = None

    def as_json(self, is_predicted: bool) -> dict[str, Any]:
        """Return the entry of the phase in JSON.

        Only a predicted trace has `low_ms` and `high_ms`.
        """
        values = asdict(self)
        return (
            values
            if is_predicted
            else {
                key: values[key] for key in values if key not in ("low_ms", "high_ms")
            }
        )


@dataclass(frozen=True)
class TransferSummary:
    """All copies of one direction in the trace, on all ranks; None where copies were
    not recorded."""

    count: int | None  # Number of copies.
    bytes: int | None  # Bytes of all copies; None if no copy has a size.
    busy_ms: float | None  # Time in which copies ran, summed over ranks.


@dataclass(frozen=True)
class MemorySummary:
    """Peaks over the whole trace, of the rank with the largest."""

    capacity_bytes: int | None  # Memory of the first rank's device.
    peak_bytes: int | None  # Peak of `pool`.
    # The pool whose peak is reported: `device` where recorded, else `allocated`, else
    # `heap`.
    pool: str | None
    pools: dict[str, int]  # Peak of each recorded pool, bytes.


@dataclass(frozen=True, repr=False)
class Summary(TabularResult, table="phases"):
    """The figures of a trace on one page.

    Attributes:
        iterations: Number of iterations, warm-up included.
        warmup_iterations: How many of them medians leave out.
        ranks: Number of ranks.
        iteration_ms: Median time of an iteration, on the slowest rank.
        uneven: The mean of the same times and why it is above the median; None where it
            is not far above.
        cycle: Count, time and parts of the outer cycle that the job repeats; None
            without one.
        phases: One entry per phase, and `other`.
        transfers: One entry per direction.
        memory: Peaks.
        free_pool: The pool that free memory is computed from; None where no memory of a
            device was recorded.
        gpu: Utilization, power, clocks and temperature, one entry per quantity and
            phase; None where not recorded.
        totals: Figures of the whole trace, of a trace without iterations; None of
            others.
        about: Lines on the job: command, device, model, optimizer.
        remarks: Lines on the quality of the data.
        is_predicted: Whether a dry run made the trace; `predicted` in JSON.
        iteration_range: Of a predicted trace, the range of `iteration_ms` by jobs that
            are like it; `iteration_low_ms`, `iteration_high_ms` and `range_is_guess` in
            JSON.
        storage: Bytes and waits of storage, per rank and direction; empty where none
            was used.
        rank_differences: The ranks that differ from the others.
        without_gradients_ms: Part of `other`: forwards without gradients (reference
            models, generation, evaluation). None where none were recorded.
        times_ms: Times of the steady iterations on the slowest rank, of each phase and
            of the `iteration`.
    """

    iterations: int
    warmup_iterations: int
    ranks: int
    iteration_ms: float | None
    phases: list[PhaseSummary]
    transfers: dict[str, TransferSummary]
    memory: MemorySummary
    free_pool: str | None
    gpu: list[GpuFigure] | None
    totals: Totals | None
    about: list[str]
    remarks: list[str]
    uneven: UnevenTimes | None = None
    cycle: dict[str, Any] | None = None
    is_predicted: bool = False
    iteration_range: TimeRange | None = None
    storage: tuple[StorageUse, ...] = ()
    rank_differences: RankDifferences = NOT_COMPARED
    without_gradients_ms: float | None = None
    times_ms: dict[str, list[float | None]] = field(default_factory=dict)

    @property
    def longest_phase(self) -> PhaseSummary | None:
        """The phase with the largest share of an iteration; None where shares are not
        known."""
        shared = [phase for phase in self.phases if phase.share is not None]
        return max(shared, key=lambda phase: phase.share or 0.0, default=None)

    @property
    def mean_ms(self) -> float | None:
        """The mean of the steady iterations on the slowest rank; None without any."""
        times = [time for time in self.times_ms["iteration"] if time is not None]
        return fmean(times) if times else None

    def as_json(self) -> dict[str, Any]:
        """Return the object that `ebbtide summary --json` prints."""
        memory = asdict(self.memory)
        memory["pools"] = {
            pool: {"peak_bytes": peak} for pool, peak in self.memory.pools.items()
        }
        return {
            "iterations": self.iterations,
            "warmup_iterations": self.warmup_iterations,
            "ranks": self.ranks,
            "iteration_ms": self.iteration_ms,
            "mean_ms": self.mean_ms,
            "cycle": self.cycle,
            "uneven": None if self.uneven is None else asdict(self.uneven),
            "without_gradients_ms": self.without_gradients_ms,
            "iterations_ms": self.times_ms["iteration"],
            "phases": [
                {
                    **phase.as_json(self.is_predicted),
                    "iterations_ms": self.times_ms[phase.phase],
                }
                for phase in self.phases
            ],
            "transfers": {
                direction: asdict(transfer)
                for direction, transfer in self.transfers.items()
            },
            "memory": memory,
            "free_pool": self.free_pool,
            "gpu": None
            if self.gpu is None
            else [asdict(figure) for figure in self.gpu],
            "totals": None if self.totals is None else asdict(self.totals),
            "storage": [asdict(use) for use in self.storage],
            "rank_differences": self.rank_differences.as_json(),
            "remarks": self.remarks,
            **self._prediction(),
        }

    def _prediction(self) -> dict[str, Any]:
        """Return the keys that only a predicted trace has."""
        if not self.is_predicted:
            return {}
        times = self.iteration_range
        low_ms, high_ms = (
            (None, None) if times is None else (times.low_ms, times.high_ms)
        )
        return {
            "predicted": True,
            "iteration_low_ms": low_ms,
            "iteration_high_ms": high_ms,
            "range_is_guess": None if times is None else times.is_guess,
            "trust": None
            if times is None or times.evidence is None
            else times.evidence.as_json(),
        }


def summarize(trace: Trace) -> Summary:
    """Summarize a trace. Medians leave the warm-up out."""
    read_by_parts(trace, _summarize)
    return _summarize(trace)


def _summarize(trace: Trace) -> Summary:
    steady = steady_iterations(trace)
    pool, pool_of_free = peak_pool(trace), free_pool(trace)
    slowest = slowest_times(trace)
    total = median_ms(trace, "iteration")
    peaks = _stack(
        [phase_peaks(trace, rank, pool) for rank in trace.ranks] if pool else [],
        steady.numbers,
    )
    free = _stack(
        [_free(trace, rank, pool_of_free) for rank in trace.ranks]
        if pool_of_free
        else [],
        steady.numbers,
    )
    moved = {
        direction: _stack(
            [phase_bytes(trace, rank, direction) for rank in trace.ranks],
            steady.numbers,
        )
        for direction in DIRECTIONS
    }
    phases = []
    shares = _shares(trace)
    for phase in ITERATION_PARTS:
        phase_times = slowest.columns[phase]
        median, times = median_ms(trace, phase), predicted_range(trace, phase)
        phases.append(
            PhaseSummary(
                phase=phase,
                count=max(
                    (part_counts(trace, rank)[phase] for rank in trace.ranks), default=0
                ),
                median_ms=median,
                p95_ms=float(np.percentile(phase_times, 95))
                if median is not None
                else None,
                peak_bytes=_median_bytes(peaks[phase]),
                min_free_bytes=_median_bytes(free[phase]),
                # Copies of a phase that the trace does not show belong to another part.
                h2d_bytes=_median_bytes(moved["h2d"][phase])
                if median is not None
                else None,
                d2h_bytes=_median_bytes(moved["d2h"][phase])
                if median is not None
                else None,
                share=shares.get(phase),
                low_ms=None if times is None else times.low_ms,
                high_ms=None if times is None else times.high_ms,
            )
        )
    return Summary(
        iterations=len(steady.numbers) + steady.warmup,
        warmup_iterations=steady.warmup,
        ranks=len(trace.ranks),
        iteration_ms=total,
        phases=phases,
        transfers={direction: _transfers(trace, direction) for direction in DIRECTIONS},
        memory=_memory(trace, pool),
        free_pool=pool_of_free,
        gpu=gpu_state(trace).figures or None,
        totals=None if steady.numbers else whole_trace(trace),
        about=_about(trace),
        remarks=_remarks(trace),
        uneven=uneven_iterations(trace),
        cycle=repeated_cycle(trace),
        is_predicted=is_predicted(trace),
        iteration_range=predicted_range(trace, "iteration"),
        storage=tuple(storage_use(trace)),
        rank_differences=rank_differences(trace),
        without_gradients_ms=without_gradients_ms(trace),
        times_ms={
            part: [None if np.isnan(time) else float(time) for time in times]
            for part, times in slowest.columns.items()
        },
    )


def _stack(
    tables: Iterable[IterationTable | None], iterations: list[int]
) -> dict[str, Floats]:
    """Return the values of each phase in some iterations, of all ranks."""
    recorded = [table.only(iterations).columns for table in tables if table is not None]
    return {
        part: np.concatenate([np.empty(0), *(columns[part] for columns in recorded)])
        for part in ITERATION_PARTS
    }


def _free(trace: Trace, rank: int, pool: str) -> IterationTable | None:
    capacity = capacity_bytes(trace, rank)
    if capacity is None:
        return None
    peaks = phase_peaks(trace, rank, pool)
    return IterationTable(
        peaks.numbers,
        {part: capacity - values for part, values in peaks.columns.items()},
    )


def _transfers(trace: Trace, direction: str) -> TransferSummary:
    recorded = [rank for rank in trace.ranks if trace.rank(rank).transfers_recorded]
    if not recorded:
        return TransferSummary(None, None, None)
    count, sizes, busy_ns = 0, [], 0
    for table in (trace.columns(rank, "transfers") for rank in recorded):
        own = table.equal("direction", direction)
        count += int(own.sum())
        sizes += table.ints("bytes")[own & table.recorded("bytes")].tolist()
        busy_ns += union_length(table.ints("start_ns")[own], table.ints("end_ns")[own])
    return TransferSummary(
        count, None if count and not sizes else sum(sizes), busy_ns / 1e6
    )


def _memory(trace: Trace, pool: str | None) -> MemorySummary:
    peaks: dict[str, int] = {}
    for rank in trace.ranks:
        for name, peak in pool_peaks(trace, rank).items():
            peaks[name] = max(peaks.get(name, 0), peak)
    capacity = capacity_bytes(trace, trace.ranks[0]) if trace.ranks else None
    return MemorySummary(
        capacity, peaks.get(pool or ""), pool, dict(sorted(peaks.items()))
    )


def _about(trace: Trace) -> list[str]:
    """Describe the job in a few lines: command, device, model, optimizer."""
    lines = out_of_memory_remarks(trace)
    if command := trace.meta.command:
        lines.append(f"command: {command_text(command)}")
    for entry in trace.meta.ranks[:1]:
        device = entry.main_device
        if device.name:
            torch = f", torch {entry.torch}" if entry.torch else ""
            lines.append(f"device: {device.name} ({device.device}){torch}")
        model = entry.model
        if model.params:
            names = "".join(f"{name}, " for name in model.classes)
            kinds = f" ({', '.join(sorted(model.dtypes))})" if model.dtypes else ""
            lines.append(
                f"model: {names}{model.params:,} parameters on this rank{kinds}"
            )
        for optimizer in entry.optimizers:
            params = (
                f", {optimizer.params:,} parameters"
                if optimizer.params is not None
                else ""
            )
            state = (
                f", state {optimizer.state_bytes / 2**20:,.1f} MiB"
                if optimizer.state_bytes is not None
                else ""
            )
            lines.append(
                f"optimizer: {optimizer.class_name or NOT_KNOWN}{params}{state}"
            )
    return lines


def command_text(command: Iterable[Any], max_chars: int = 110) -> str:
    """Return a job's command on one line, from its script on and cut to a length."""
    words = [str(word) for word in command]
    script = next((n for n, word in enumerate(words) if word.endswith(".py")), 0)
    text = shlex.join(words if len(shlex.join(words)) <= max_chars else words[script:])
    return text if len(text) <= max_chars else text[: max_chars - 2] + " …"


def _remarks(trace: Trace) -> list[str]:
    """Describe limits of the data that the figures do not show."""
    link = any(len(trace.columns(rank, "link")) for rank in trace.ranks)
    copies = any(trace.rank(rank).transfers_recorded for rank in trace.ranks)
    remarks, numbers = on_demand_remarks(trace), steady_iterations(trace).numbers
    if not link and not copies:
        remarks.append(no_link(trace))
    elif not copies:
        remarks.append(
            "link bytes are from sampled counters; `ebbtide profile --transfers` "
            "records each copy"
        )
    if link or copies:
        remarks += partly_no_link(trace)
    for rank in trace.ranks:
        if trace.rank(rank).transfers_spans_ns and len(
            copied_iterations(trace, rank)
        ) < len(numbers):
            shown = f"{len(copied_iterations(trace, rank))} of {len(numbers)}"
            remarks.append(
                f"rank {rank}: copies were recorded in {shown} iterations; the others "
                "count as not known"
            )
    is_real = trace.meta.source not in ("simulated", "predicted")
    has_gpu = any(
        device.kind == "cuda" for entry in trace.meta.ranks for device in entry.devices
    )
    if (
        has_gpu
        and is_real
        and not any(len(trace.columns(rank, "gpu")) for rank in trace.ranks)
    ):
        remarks.append(NO_GPU_STATE)
    whole, *parts = (
        median_ms(trace, part) or 0.0 for part in ("iteration", *ITERATION_PARTS)
    )
    if abs(sum(parts) - whole) > 0.1 * whole:
        times = (
            f"{ms_text(sum(parts))} of the phases, {ms_text(whole)} of the iteration"
        )
        remarks.append(
            f"medians of {len(numbers)} noisy iterations do not add up: {times}"
        )
    if trace.meta.state == "recording":
        remarks.append(
            "this trace is not finished: its recording was cut off or is still running"
        )
    return remarks


def _shares(trace: Trace) -> dict[str, float]:
    """Return the shares of iterations' known parts in the sum of their medians."""
    medians = {
        part: ms
        for part in ITERATION_PARTS
        if (ms := median_ms(trace, part)) is not None
    }
    whole_ms = sum(medians.values())
    return {part: ms / whole_ms for part, ms in medians.items()} if whole_ms else {}


def _median_bytes(values: Floats) -> int | None:
    median = median_or_none(values)
    return None if median is None else round(median)
