"""Finds runs that become slower, or run out of memory, in comparison with their own beginning."""

from __future__ import annotations

from collections.abc import Callable

from ebbtide.analysis.findings.finding import Finding, clamp_gain
from ebbtide.analysis.metrics.drift import Drift, find_drifts
from ebbtide.analysis.metrics.trace_metrics import TraceMetrics
from ebbtide.units import bytes_text, ms_text, rate_text

_TITLES = {
    "iteration_time": "Iterations become slower during the run",
    "link_speed": "The link becomes slower during the run",
    "copy_rate": "Copies become slower during the run",
    "sm_clock": "The GPU's clock falls during the run",
    "free_memory": "Free memory shrinks during the run",
}
_TEXTS: dict[str, tuple[str, Callable[[float], str]]] = {
    "iteration_time": ("an iteration takes {after}, {before} at the beginning", ms_text),
    "link_speed": ("the link under load can carry {after} per direction, {before} at the beginning", rate_text),
    "copy_rate": ("copies of 1 MiB or more run at {after}, {before} at the beginning", rate_text),
    "sm_clock": (
        "the SM clock of the busy GPU is {after}, {before} at the beginning",
        lambda megahertz: f"{megahertz:,.0f} MHz",
    ),
    "free_memory": ("the least free memory of an iteration is {after}, {before} at the beginning", bytes_text),
}
_ADVICE = {
    "iteration_time": "look for what else changes with time on that host: other jobs, sequence lengths, data loading, "
    "logs and caches that grow",
    "link_speed": "check the card's seat, riser and the kernel log (AER errors): a link falls back to a lower "
    "generation or fewer lanes after errors",
    "copy_rate": "look for other traffic on the link and in host memory, and for memory that is no longer pinned",
    "sm_clock": "check power limit, temperature and fans (nvidia-smi -q -d PERFORMANCE)",
    "free_memory": "look for tensors that are kept, such as losses that are summed with their graph; a memory snapshot "
    "shows who holds them",
}


def check(metrics: TraceMetrics) -> Finding | None:
    """Report every quantity that `find_drifts` finds; the gain is that of the iteration time."""
    drifts = find_drifts(metrics.trace)
    if not drifts:
        return None
    slower = [drift for drift in drifts if drift.quantity == "iteration_time"]
    causes = [drift for drift in drifts if drift.quantity != "iteration_time"]
    return Finding(
        "drift",
        _TITLES[drifts[0].quantity],
        clamp_gain(slower[0].mean_change) if slower else None,
        tuple(_evidence(drift) for drift in drifts),
        "; ".join(_ADVICE[drift.quantity] for drift in causes or drifts),
    )


def _evidence(drift: Drift) -> str:
    text, unit = _TEXTS[drift.quantity]
    rank = "" if drift.rank is None else f"rank {drift.rank}: "
    percent = f" ({100 * (drift.after / drift.before - 1):+.0f} %)" if drift.before else ""
    moment = f"iteration {drift.first:.0f}" if drift.counts_iterations else f"{ms_text(drift.first)} after the start"
    how = f"; it changes steadily, from about {moment} on" if drift.is_gradual else f"; since {moment}"
    return rank + text.format(after=unit(drift.after), before=unit(drift.before)) + percent + how
