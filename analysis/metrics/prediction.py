"""Traces of dry runs: the line that says so, and the ranges of their times."""

from dataclasses import dataclass

import numpy as np

from ebbtide.analysis.metrics.cache import once_per_trace
from ebbtide.analysis.metrics.iterations import median_ms, steady_iterations
from ebbtide.analysis.metrics.job_kind import kind_of_trace
from ebbtide.machines.accuracy import evidence_for
from ebbtide.machines.evidence import EvidenceRange
from ebbtide.profiler.trace import Trace
from ebbtide.units import range_text

PREDICTED = "predicted by a dry run"
_WHOLE = "iteration"


@dataclass(frozen=True)
class TimeRange:
    """The range of the time of a part of an iteration, ms."""

    low_ms: float
    high_ms: float
    # What the range is made from; None for a phase, whose ends are assumptions.
    evidence: EvidenceRange | None = None

    @property
    def is_guess(self) -> bool:
        """Whether too few projects are like the job."""
        return self.evidence is not None and self.evidence.is_guess

    @property
    def trust(self) -> str:
        """The trust in the range, in a line."""
        return "" if self.evidence is None else f"80 % range; {self.evidence.text}"

    @property
    def text(self) -> str:
        """The range in words."""
        words = range_text(self.low_ms, self.high_ms)
        return f"{words}, a guess" if self.is_guess else words


def is_predicted(trace: Trace) -> bool:
    """Return whether a dry run made a trace."""
    return trace.meta.source == "predicted"


def prediction_line(trace: Trace) -> str | None:
    """Return the line that every output has for a dry run's trace; None for others."""
    if not is_predicted(trace):
        return None
    machine = (
        trace.meta.prediction.machine if trace.meta.prediction is not None else None
    )
    return f"{PREDICTED}, not measured{f' (machine {machine})' if machine else ''}"


@once_per_trace
def evidence_of(trace: Trace) -> EvidenceRange | None:
    """Return how far predictions of jobs like that of a dry run were off.

    None for measured traces.
    """
    is_known = trace.meta.prediction is not None
    return evidence_for(kind_of_trace(trace)) if is_known else None


@once_per_trace
def predicted_range(trace: Trace, part: str) -> TimeRange | None:
    """Return the range of the time of a phase, `other` or `iteration`; None for
    measured traces, and without a steady iteration.

    The range of an iteration follows from the evidence of jobs that are like it. The
    ends of a phase are its times under fast and slow assumptions, each a median of the
    slowest rank as for measured times."""
    if trace.meta.prediction is None:
        return None
    if part == _WHOLE:
        likely_ms, evidence = median_ms(trace, part), evidence_of(trace)
        if likely_ms is None or evidence is None:
            return None
        ends = likely_ms * evidence.low, likely_ms * evidence.high
        return TimeRange(*ends, evidence)
    numbers, slowest = (
        set(steady_iterations(trace).numbers),
        dict[int, tuple[float, float]](),
    )
    for time in trace.meta.prediction.times:
        if time.phase == part and time.iteration in numbers:
            low_ms, high_ms = slowest.get(time.iteration, (0.0, 0.0))
            slowest[time.iteration] = (
                max(low_ms, time.low_ms),
                max(high_ms, time.high_ms),
            )
    return (
        TimeRange(*np.median(list(slowest.values()), axis=0).tolist())
        if slowest
        else None
    )
