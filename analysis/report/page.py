"""What the page says, before it is HTML."""

from __future__ import annotations

from dataclasses import dataclass

from ebbtide.analysis.findings import Findings
from ebbtide.analysis.metrics.iteration_stats import iterations
from ebbtide.analysis.metrics.link import link_use
from ebbtide.analysis.metrics.summary import Summary, summarize
from ebbtide.analysis.report.columns import Table
from ebbtide.analysis.report.facts import Fact, facts
from ebbtide.analysis.report.rank import RankView, rank_view
from ebbtide.analysis.report.tables import MOST_ROWS, rank_table, summary_table
from ebbtide.profiler.trace import Trace
from ebbtide.units import bytes_text

# A page is under 5 MB: so many ranks are drawn, and in all of them together so many points of lines, and so many boxes
# of each kind.
MOST_RANKS = 8
_MOST_POINTS = 80_000
_MOST_BOXES = 4_500


@dataclass(frozen=True)
class Figure:
    """A figure that stands by itself: label, value with its unit, and what it is to be seen against."""

    label: str
    value: str
    beside: str


@dataclass(frozen=True)
class Page:
    """missing: lines on what was not recorded. left_out: a line on ranks that are not drawn."""

    name: str
    about: str
    findings: Findings
    summary: Summary
    figures: list[Figure]
    phases: Table | None
    ranks: list[RankView]
    left_out: str | None
    compared: Table | None
    facts: list[Fact]
    missing: list[str]
    notes: list[str]


def page(trace: Trace, findings: Findings, min_bytes: int, rank: int | None = None) -> Page:
    """All that the page tells. rank: the only one to draw. Raises TraceError for a rank that is not there."""
    if rank is not None:
        trace.rank(rank)
    drawn = [rank] if rank is not None else trace.ranks[:MOST_RANKS]
    others = len(trace.ranks) - len(drawn)
    left_out = None
    if others:
        ranks = "rank is" if others == 1 else "ranks are"
        left_out = f"{others} more {ranks} not drawn: --rank N draws another one"
    summary = summarize(trace)
    spread, link = iterations(trace), link_use(trace)
    share = max(len(drawn), 1)
    limits = _MOST_POINTS // share, _MOST_BOXES // share, max(MOST_ROWS // share, 50)
    return Page(
        name=trace.name,
        about=_about(trace, summary),
        findings=findings,
        summary=summary,
        figures=_figures(summary),
        phases=summary_table(summary) if summary.iterations else None,
        ranks=[rank_view(trace, number, spread, link, min_bytes, *limits) for number in drawn],
        left_out=left_out,
        compared=rank_table(trace, spread, MOST_ROWS) if len(trace.ranks) > 1 else None,
        facts=facts(trace),
        missing=_missing(trace, summary),
        notes=trace.notes,
    )


def _about(trace: Trace, summary: Summary) -> str:
    source = {"recorded": "a recorded run", "imported": "an imported run", "simulated": "a simulation"}
    ranks = f"{len(trace.ranks)} rank{'' if len(trace.ranks) == 1 else 's'}"
    parts = [source.get(str(trace.meta.get("source")), "a run"), ranks]
    if summary.iterations:
        warmup = f", the first {summary.warmup_iterations} left out as warm-up" if summary.warmup_iterations else ""
        parts.append(f"{summary.iterations} iterations{warmup}")
    return " · ".join(parts)


def _figures(summary: Summary) -> list[Figure]:
    figures = []
    if summary.iteration_ms is not None:
        counted = summary.iterations - summary.warmup_iterations
        figures.append(Figure("iteration", f"{summary.iteration_ms:,.0f} ms", f"median of {counted}"))
    memory = summary.memory
    if memory.peak_bytes is not None:
        capacity = (
            f"of {bytes_text(memory.capacity_bytes)}" if memory.capacity_bytes is not None else "capacity not known"
        )
        figures.append(Figure(f"peak {memory.pool} memory", bytes_text(memory.peak_bytes), capacity))
    for way, words in (("h2d", "host to device"), ("d2h", "device to host")):
        moved = [getattr(phase, f"{way}_bytes") for phase in summary.phases]
        known = [size for size in moved if size is not None]
        if known:
            figures.append(Figure(way, bytes_text(sum(known)), f"{words}, per iteration"))
    return figures


def _missing(trace: Trace, summary: Summary) -> list[str]:
    lines: list[str] = []
    if not trace.ranks:
        lines.append("this trace holds no rank: nothing was recorded in it")
    elif not summary.iterations:
        lines.append("no finished iteration was recorded: nothing can be said phase by phase")
    if trace.ranks and summary.memory.pool is None:
        lines.append("no memory of a device was recorded")
    elif trace.ranks and summary.memory.capacity_bytes is None:
        lines.append(
            "the capacity of the device is not known: nothing can be called free (`ebbtide import` takes `--capacity`)"
        )
    return [*lines, *(summary.remarks if trace.ranks else ())]
