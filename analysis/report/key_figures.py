"""The key figures of a report: where the time and the memory of an iteration go, and what could be gained."""

from collections.abc import Iterator
from dataclasses import dataclass

from ebbtide.analysis.findings import Findings
from ebbtide.analysis.metrics.devices import ran_on_cpu
from ebbtide.analysis.metrics.job import JobMetrics
from ebbtide.analysis.metrics.link_throughput import DIRECTIONS
from ebbtide.analysis.metrics.phases import iteration_bytes
from ebbtide.analysis.metrics.summary import Summary
from ebbtide.units import bytes_text, ms_text, range_text


@dataclass(frozen=True)
class KeyFigure:
    """A figure: label, value with its unit, and what it relates to."""

    label: str
    value: str
    context: str


def key_figures(metrics: JobMetrics, findings: Findings) -> list[KeyFigure]:
    """Return the key figures that were recorded; those of a trace without iterations are of the whole trace."""
    summary = metrics.summary()
    figures = (
        *_times(summary),
        *_memory(metrics, summary),
        *_link(metrics, summary),
        *_potential(findings, summary.iteration_ms),
    )
    return list(figures)


def _times(summary: Summary) -> Iterator[KeyFigure]:
    totals = summary.totals
    if summary.iteration_ms is not None:
        context = f"median of {summary.iterations - summary.warmup_iterations}"
        if (whole := summary.iteration_range) is not None:
            context = f"predicted: {range_text(whole.low_ms, whole.high_ms)}"
        yield KeyFigure("iteration", ms_text(summary.iteration_ms), context)
        longest = summary.longest_phase
        if longest is not None and longest.share is not None:
            yield KeyFigure(longest.phase, f"{100 * longest.share:.0f} %", f"{ms_text(longest.median_ms)}, the most")
    elif totals is not None and totals.span_ms is not None:
        yield KeyFigure("whole trace", ms_text(totals.span_ms), "no finished iteration")


def _memory(metrics: JobMetrics, summary: Summary) -> Iterator[KeyFigure]:
    memory = summary.memory
    if memory.peak_bytes is not None:
        capacity = "capacity unknown"
        if memory.capacity_bytes is not None:
            of_host = " of host memory" if ran_on_cpu(metrics.trace) else ""
            capacity = f"of {bytes_text(memory.capacity_bytes)}{of_host}"
        yield KeyFigure(f"peak {memory.pool} memory", bytes_text(memory.peak_bytes), capacity)
    if metrics.always_free_bytes is not None:
        free = {row.phase: row.min_free_bytes for row in summary.phases if row.min_free_bytes is not None}
        phase = max(free, key=lambda name: free[name], default=None)
        context = "at every moment" if phase is None else f"{bytes_text(free[phase])} in {phase}"
        yield KeyFigure("always free memory", bytes_text(metrics.always_free_bytes), context)


def _link(metrics: JobMetrics, summary: Summary) -> Iterator[KeyFigure]:
    sizes = {direction: iteration_bytes(metrics.trace, direction) for direction in DIRECTIONS}
    recorded = {direction: size for direction, size in sizes.items() if size is not None}
    if not recorded:
        return
    context = ", ".join(f"{bytes_text(size)} {direction}" for direction, size in recorded.items())
    peak = metrics.peak_bytes_per_s
    if peak and summary.iteration_ms:
        share = max(recorded.values()) / (summary.iteration_ms / 1e3) / peak
        context = f"{context}; {100 * share:.0f} % of the link's peak"
    yield KeyFigure("copied per iteration", bytes_text(sum(recorded.values())), context)


def _potential(findings: Findings, iteration_ms: float | None) -> Iterator[KeyFigure]:
    best = max(findings.findings, key=lambda finding: finding.potential_gain_ms or 0.0, default=None)
    if best is None or not best.potential_gain_ms:
        return
    number = findings.findings.index(best) + 1
    share = f"{100 * best.potential_gain_ms / iteration_ms:.0f} % of an iteration, " if iteration_ms else ""
    kind = "simulated" if best.is_simulated else "at most"
    yield KeyFigure("potential gain", ms_text(best.potential_gain_ms), f"{share}{kind}: finding {number}")
