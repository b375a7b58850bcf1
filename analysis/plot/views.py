"""What is shown of each trace, all on one scale of time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pandas as pd

from ebbtide.analysis.metrics.iterations import intervals
from ebbtide.analysis.timeseries.step_functions import Floats, Ints
from ebbtide.errors import TraceError
from ebbtide.profiler.trace import Trace

# The phases of an iteration that is a smaller part of the time axis cannot be told apart.
_LEAST_ITERATION = 1 / 90
# Of what follows the last phase so large a part is shown, of the time before it.
_AFTERWARDS = 1 / 25


@dataclass(frozen=True)
class View:
    """One rank of a trace from start to end, ns on its clock. asked: the iterations [first, end) to show. length: ns of
    the longest of all views that are drawn together; unit_ns and unit: of the time axis, which begins at start."""

    trace: Trace
    rank: int
    asked: tuple[int, int | None]
    start: int
    end: int
    length: int
    unit_ns: float
    unit: str

    def x(self, times: Ints) -> Floats:
        return np.asarray((times - self.start) / self.unit_ns)

    def inside(self, starts: Ints, ends: Ints) -> npt.NDArray[np.bool_]:
        return np.asarray((ends > self.start) & (starts < self.end))

    def spans(self, on_gpu: bool) -> pd.DataFrame:
        """iteration, start_ns, end_ns of the finished iterations that are shown, by the GPU's times or the host's."""
        return _asked(intervals(self.trace, self.rank, on_gpu).spans, self.asked)

    def phases(self, on_gpu: bool) -> pd.DataFrame:
        """phase, start_ns, end_ns of what is shown of the phases, those of an unfinished iteration too."""
        rows = self.trace.phases(self.rank)
        start, end = ("gpu_start_ns", "gpu_end_ns") if on_gpu and self.has_gpu_times else ("start_ns", "end_ns")
        rows = rows[rows[end].notna()]
        starts, ends = rows[start].to_numpy(np.int64), rows[end].to_numpy(np.int64)
        times = {"start_ns": starts.clip(self.start, self.end), "end_ns": ends.clip(self.start, self.end)}
        return rows[["phase"]].assign(**times)[self.inside(starts, ends)]

    @cached_property
    def is_wide(self) -> bool:
        """Whether there is room to draw the phases of each iteration."""
        spans = self.spans(on_gpu=False)
        lengths = spans["end_ns"] - spans["start_ns"]
        return spans.empty or float(lengths.median()) >= self.length * _LEAST_ITERATION

    @cached_property
    def has_gpu_times(self) -> bool:
        """Whether every phase of a finished iteration has them: else they are not used."""
        rows = self.trace.phases(self.rank)
        finished = rows.loc[rows["iteration"].notna(), "gpu_end_ns"]
        return len(finished) > 0 and bool(finished.notna().all())


def views(traces: Sequence[Trace], span: tuple[int, int | None], rank: int | None) -> list[View]:
    """span: the iterations [first, end) to show. rank: the one to show, else each trace's first. Raises TraceError
    where a trace has no such rank or no such iterations, or nothing at all."""
    chosen = [(trace, _rank(trace, rank)) for trace in traces]
    times = [_times(trace, r, span) for trace, r in chosen]
    length = max(max(end - start for start, end in times), 1)
    unit_ns, unit = (1e9, "s") if length >= 2e9 else (1e6, "ms")
    return [View(trace, r, span, *cut, length, unit_ns, unit) for (trace, r), cut in zip(chosen, times, strict=True)]


def _rank(trace: Trace, rank: int | None) -> int:
    if rank is not None:
        trace.rank(rank)
        return rank
    if not trace.ranks:
        raise TraceError(f"{trace.path} holds no rank: nothing was recorded in it")
    return trace.ranks[0]


def _times(trace: Trace, rank: int, span: tuple[int, int | None]) -> tuple[int, int]:
    """(start ns, end ns) to show: the iterations asked for, or all there is, with a little of what followed."""
    if span != (0, None):
        return _of_iterations(trace, rank, span)
    phases = trace.phases(rank)
    memory, link, copies = trace.memory(rank)["t_ns"], trace.link(rank), trace.transfers(rank)
    starts_and_ends = (
        (memory, memory),
        (link["t_ns"] - link["window_ns"], link["t_ns"]),
        (copies["start_ns"], copies["end_ns"]),
    )
    recorded = [(int(starts.min()), int(ends.max())) for starts, ends in starts_and_ends if len(starts)]
    if phases.empty and not recorded:
        raise TraceError(f"{trace.path} holds neither phases nor memory nor link: there is nothing to draw")
    last = max((end for _, end in recorded), default=0)
    if phases.empty:
        return min(start for start, _ in recorded), last
    spans = intervals(trace, rank, device_times=False).spans
    start = int(pd.concat([phases["start_ns"], spans["start_ns"]]).min())
    end = int(pd.concat([phases["end_ns"], phases["gpu_end_ns"].dropna()]).max())
    return start, min(end + int((end - start) * _AFTERWARDS), max(end, last))


def _of_iterations(trace: Trace, rank: int, span: tuple[int, int | None]) -> tuple[int, int]:
    spans = intervals(trace, rank, device_times=False).spans
    kept = _asked(spans, span)
    if kept.empty:
        has = f"{spans['iteration'].min()} to {spans['iteration'].max()}" if len(spans) else "none"
        asked = f"{span[0]}:{'' if span[1] is None else span[1]}"
        raise TraceError(f"{trace.path} has no iterations {asked} (it has {has})")
    # The GPU is done with an iteration later than the host.
    last = _asked(intervals(trace, rank).spans, span)["end_ns"].max()
    return int(kept["start_ns"].min()), max(int(kept["end_ns"].max()), int(last))


def _asked(spans: pd.DataFrame, asked: tuple[int, int | None]) -> pd.DataFrame:
    first, after = asked
    return spans[(spans["iteration"] >= first) & (spans["iteration"] < (np.inf if after is None else after))]
