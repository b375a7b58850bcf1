"""Collects the content of the page, before it is HTML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ebbtide.analysis.findings import Findings
from ebbtide.analysis.metrics.devices import free_memory_text, ran_on_cpu
from ebbtide.analysis.metrics.iteration_stats import compare_iterations
from ebbtide.analysis.metrics.link import link_use
from ebbtide.analysis.metrics.missing import NO_MEMORY, no_capacity, no_iterations
from ebbtide.analysis.metrics.ranks.selection import ShownRank, shown_ranks
from ebbtide.analysis.metrics.summary import Summary, summarize
from ebbtide.analysis.report.columns import ReportTable
from ebbtide.analysis.report.gpu_table import gpu_table
from ebbtide.analysis.report.heat import HeatSection, heat_section
from ebbtide.analysis.report.job_description import JobDetail, describe_job
from ebbtide.analysis.report.rank import RankView, rank_view
from ebbtide.analysis.report.rank_tables import differences_table, rank_table
from ebbtide.analysis.report.tables import MAX_ROWS, summary_table
from ebbtide.analysis.report.timeline_content import DetailLimits
from ebbtide.profiler.trace import Trace
from ebbtide.units import bytes_text, range_text

# Limits that keep a page smaller than 5 MB. Points and boxes of each kind are those of all ranks together.
_MAX_POINTS = 80_000
_MAX_BOXES = 4_500
_MIN_ROWS = 50
_SOURCES = {
    "recorded": "a recorded run",
    "imported": "an imported run",
    "simulated": "a simulation",
    "predicted": "predicted by a dry run",
}


@dataclass(frozen=True)
class KeyFigure:
    """A figure at the top of the summary: label, value with its unit, and what it relates to."""

    label: str
    value: str
    context: str


@dataclass(frozen=True)
class Page:
    """Content of the page.

    Attributes:
        name: Name of the trace.
        about: Line on the source of the trace, its ranks and iterations.
        findings: Findings of the rules.
        summary: Figures of the trace.
        figures: The most important figures.
        phases: Table of phases; None where there are no iterations.
        gpu: Table of the state of the GPUs; None where it was not recorded.
        ranks: Ranks that are shown.
        omitted_ranks: Line on ranks that are not shown; None where all are.
        heat: Heat maps of all ranks; None where there are few.
        differences: Table of the ranks that differ; None where none does.
        compared: Table of all ranks; None for a single rank.
        job: Description of the job.
        missing: Lines on what was not recorded.
        notes: Notes of the trace.
    """

    name: str
    about: str
    findings: Findings
    summary: Summary
    figures: list[KeyFigure]
    phases: ReportTable | None
    gpu: ReportTable | None
    ranks: list[RankView]
    omitted_ranks: str | None
    heat: HeatSection | None
    differences: ReportTable | None
    compared: ReportTable | None
    job: list[JobDetail]
    missing: list[str]
    notes: Sequence[str]


def build_page(trace: Trace, findings: Findings, min_bytes: int, ranks: Sequence[int] = ()) -> Page:
    """Collect the content of a trace's page.

    Args:
        trace: The trace.
        findings: Its findings.
        min_bytes: Least free memory of a window, bytes.
        ranks: Ranks to show: see `shown_ranks`.

    Raises:
        TraceError: The trace has no such rank.
    """
    shown = shown_ranks(trace, ranks)
    summary = summarize(trace)
    numbers = [entry.rank for entry in shown]
    iterations, link = compare_iterations(trace, numbers), link_use(trace, numbers)
    count = max(len(shown), 1)
    limits = DetailLimits(_MAX_POINTS // count, _MAX_BOXES // count, max(MAX_ROWS // count, _MIN_ROWS))
    return Page(
        name=trace.name,
        about=_about(trace, summary),
        findings=findings,
        summary=summary,
        figures=_figures(trace, summary),
        phases=summary_table(summary, free_memory_text(trace)) if summary.iterations else None,
        gpu=gpu_table(summary.gpu) if summary.gpu is not None else None,
        ranks=[rank_view(trace, entry, iterations, link, min_bytes, limits) for entry in shown],
        omitted_ranks=_omitted(shown, len(trace.ranks) - len(shown)),
        heat=heat_section(trace),
        differences=differences_table(summary.rank_differences),
        compared=rank_table(trace, MAX_ROWS) if len(trace.ranks) > 1 else None,
        job=describe_job(trace),
        missing=_missing(trace, summary),
        notes=trace.notes,
    )


def _omitted(shown: Sequence[ShownRank], count: int) -> str | None:
    if not count:
        return None
    reasons = ", ".join(f"{entry.rank} ({entry.reason})" for entry in shown if entry.reason)
    drawn = f"drawn are {reasons}; " if reasons else ""
    return f"{drawn}{count:,} more {'rank is' if count == 1 else 'ranks are'} not drawn: --rank N draws another one"


def _about(trace: Trace, summary: Summary) -> str:
    ranks = f"{len(trace.ranks)} rank{'' if len(trace.ranks) == 1 else 's'}"
    parts = [_SOURCES.get(trace.meta.source or "", "a run"), ranks]
    if summary.iterations:
        warmup = f", the first {summary.warmup_iterations} left out as warm-up" if summary.warmup_iterations else ""
        parts.append(f"{summary.iterations} iterations{warmup}")
    return " · ".join(parts)


def _figures(trace: Trace, summary: Summary) -> list[KeyFigure]:
    figures = []
    if summary.iteration_ms is not None:
        steady = summary.iterations - summary.warmup_iterations
        context = f"median of {steady}"
        if (whole := summary.iteration_range) is not None:
            context = f"predicted: {range_text(whole.low_ms, whole.high_ms)}"
        figures.append(KeyFigure("iteration", f"{summary.iteration_ms:,.0f} ms", context))
    memory = summary.memory
    if memory.peak_bytes is not None:
        capacity = "capacity unknown"
        if memory.capacity_bytes is not None:
            of_host = " of host memory" if ran_on_cpu(trace) else ""
            capacity = f"of {bytes_text(memory.capacity_bytes)}{of_host}"
        figures.append(KeyFigure(f"peak {memory.pool} memory", bytes_text(memory.peak_bytes), capacity))
    for direction, description in (("h2d", "host to device"), ("d2h", "device to host")):
        sizes = [getattr(phase, f"{direction}_bytes") for phase in summary.phases]
        recorded = [size for size in sizes if size is not None]
        if recorded:
            figures.append(KeyFigure(direction, bytes_text(sum(recorded)), f"{description}, per iteration"))
    return figures


def _missing(trace: Trace, summary: Summary) -> list[str]:
    if not trace.ranks:
        return ["this trace has no ranks: nothing was recorded in it"]
    lines = []
    if not summary.iterations:
        lines.append(no_iterations(trace))
    if summary.memory.pool is None:
        lines.append(NO_MEMORY)
    elif summary.memory.capacity_bytes is None:
        lines.append(no_capacity(trace.ranks[0]))
    return [*lines, *summary.remarks]
