"""Time that no phase explains, and ranks that wait for each other."""

from __future__ import annotations

from ebbtide.analysis.findings.finding import Finding, Unknown
from ebbtide.analysis.metrics.iteration_stats import iterations
from ebbtide.analysis.metrics.trace_metrics import Study, at_most
from ebbtide.units import ms_text

# Between the phases jobs always do something: more than this share of the iteration is much.
_MUCH_OTHER = 0.15
# A rank that is slowest in this share of the iterations is no accident.
_OFTEN = 0.8
_LEAST_SLOWER = 0.02


def phases_recorded(study: Study) -> Unknown | None:
    """Without phases hardly any rule can say something."""
    if study.iteration_ms is not None:
        return None
    return Unknown(
        "phases",
        "which phases does an iteration have, and how long are they?",
        "record the job with `ebbtide profile`, or import its DeepSpeed log or torch.profiler trace",
    )


def between_phases(study: Study) -> Finding | None:
    """Time in which neither forward, backward nor update runs: loading data, logging, evaluation."""
    other, iteration = study.ms("other"), study.iteration_ms
    if not other or not iteration or other < _MUCH_OTHER * iteration:
        return None
    return Finding(
        "between-phases",
        "Much of the iteration lies outside forward, backward and update",
        at_most(other),
        (f"{ms_text(other)} of {ms_text(iteration)} ({100 * other / iteration:.0f} %) belong to no phase",),
        "look at data loading (workers, pinned batches), logging, and synchronising calls such as loss.item()",
    )


def slow_rank(study: Study) -> Finding | None:
    """One rank that the others wait for."""
    held = iterations(study.trace)
    if not held.slowest_rank or held.counted < 3:
        return None
    rank, often = max(held.slowest_rank.items(), key=lambda item: item[1])
    busy = {
        r: sum(s.median_ms for s in held.spreads if s.rank == r and s.phase in ("forward", "backward", "update"))
        for r in held.slowest_rank
    }
    others = sorted(ms for r, ms in busy.items() if r != rank)
    usual = others[len(others) // 2]
    gain = busy[rank] - usual
    if often < _OFTEN * held.counted or not usual or gain < _LEAST_SLOWER * usual:
        return None
    return Finding(
        "slow-rank",
        f"Rank {rank} is slower than the others",
        at_most(gain),
        (
            f"rank {rank} is the slowest in {often} of {held.counted} iterations",
            f"its phases take {ms_text(busy[rank])}, those of the median other rank {ms_text(usual)}",
        ),
        "look at that rank's clocks, temperature, link width, CPU binding and share of the work",
    )
