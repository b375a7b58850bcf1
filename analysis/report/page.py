"""Collects the content of the page, and renders it as one HTML file with its styles,
scripts, data, and Bokeh."""

import base64
import hashlib
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from bokeh.resources import Resources
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from ebbtide import seams
from ebbtide.analysis.findings import Findings
from ebbtide.analysis.metrics.devices import ran_on_cpu
from ebbtide.analysis.metrics.job import JobMetrics
from ebbtide.analysis.metrics.link_throughput import DIRECTIONS
from ebbtide.analysis.metrics.missing import NO_MEMORY, no_capacity, no_iterations
from ebbtide.analysis.metrics.phases import iteration_bytes
from ebbtide.analysis.metrics.prediction import PREDICTED
from ebbtide.analysis.metrics.summary import Summary
from ebbtide.analysis.report.job_description import JobDescription, describe_job
from ebbtide.analysis.report.rank import RankView, ShownRank, rank_view, shown_ranks
from ebbtide.analysis.report.timeline import color_styles
from ebbtide.analysis.report.timeline_content import DetailLimits
from ebbtide.analysis.tables.ranks import differences_table, rank_table
from ebbtide.analysis.tables.summary import gpu_table, phase_table
from ebbtide.analysis.tables.table import Table
from ebbtide.errors import TraceError
from ebbtide.output_files import new_output
from ebbtide.profiler.trace import Trace
from ebbtide.units import NOT_KNOWN, bytes_text, ms_text


@dataclass(frozen=True)
class KeyFigure:
    """A figure: label, value with its unit, and what it relates to."""

    label: str
    value: str
    context: str


def key_figures(metrics: JobMetrics, findings: Findings) -> list[KeyFigure]:
    """Return the key figures that were recorded: of the whole trace where it has no
    iterations."""
    summary = metrics.summary()
    recorded = (*_times(summary), *_memory(metrics, summary), *_link(metrics, summary))
    return [*recorded, *_potential(findings, summary.iteration_ms)]


def _times(summary: Summary) -> Iterator[KeyFigure]:
    totals = summary.totals
    if summary.iteration_ms is not None:
        context = f"median of {summary.iterations - summary.warmup_iterations}"
        if (whole := summary.iteration_range) is not None:
            context = f"predicted: {whole.text}; {whole.trust}"
        if (times := summary.uneven) is not None:
            context += f"; mean {ms_text(times.mean_ms)}: {times.reason}"
        yield KeyFigure("iteration", ms_text(summary.iteration_ms), context)
        longest = summary.longest_phase
        if longest is not None and longest.share is not None:
            yield KeyFigure(
                longest.phase,
                f"{100 * longest.share:.0f} %",
                f"{ms_text(longest.median_ms)}, the most",
            )
    elif totals is not None and totals.span_ms is not None:
        yield KeyFigure("whole trace", ms_text(totals.span_ms), "no finished iteration")


def _memory(metrics: JobMetrics, summary: Summary) -> Iterator[KeyFigure]:
    memory = summary.memory
    if memory.peak_bytes is not None:
        capacity = f"capacity {NOT_KNOWN}"
        if memory.capacity_bytes is not None:
            of_host = " of host memory" if ran_on_cpu(metrics.trace) else ""
            capacity = f"of {bytes_text(memory.capacity_bytes)}{of_host}"
        yield KeyFigure(
            f"peak {memory.pool} memory", bytes_text(memory.peak_bytes), capacity
        )
    if metrics.always_free_bytes is not None:
        free = {
            row.phase: row.min_free_bytes
            for row in summary.phases
            if row.min_free_bytes is not None
        }
        phase = max(free, key=lambda name: free[name], default=None)
        context = (
            "at every moment"
            if phase is None
            else f"{bytes_text(free[phase])} in {phase}"
        )
        yield KeyFigure(
            "always free memory", bytes_text(metrics.always_free_bytes), context
        )


def _link(metrics: JobMetrics, summary: Summary) -> Iterator[KeyFigure]:
    sizes = {
        direction: iteration_bytes(metrics.trace, direction) for direction in DIRECTIONS
    }
    recorded = {
        direction: size for direction, size in sizes.items() if size is not None
    }
    if not recorded:
        return
    context = ", ".join(
        f"{bytes_text(size)} {direction}" for direction, size in recorded.items()
    )
    peak = metrics.peak_bytes_per_s
    if peak and summary.iteration_ms:
        share = max(recorded.values()) / (summary.iteration_ms / 1e3) / peak
        context = f"{context}; {100 * share:.0f} % of the link's peak"
    yield KeyFigure("copied per iteration", bytes_text(sum(recorded.values())), context)


def _potential(findings: Findings, iteration_ms: float | None) -> Iterator[KeyFigure]:
    best = max(
        findings.findings,
        key=lambda finding: finding.potential_gain_ms or 0.0,
        default=None,
    )
    if best is None or not best.potential_gain_ms:
        return
    number = findings.findings.index(best) + 1
    share = (
        f"{100 * best.potential_gain_ms / iteration_ms:.0f} % of an iteration, "
        if iteration_ms
        else ""
    )
    kind = "simulated" if best.is_simulated else "at most"
    yield KeyFigure(
        "potential gain",
        ms_text(best.potential_gain_ms),
        f"{share}{kind}: finding {number}",
    )


# Limits that keep a page smaller than 5 MB. Points and boxes of each kind count for
# all ranks together.
_MAX_POINTS = 80_000
_MAX_BOXES = 4_500
_MIN_ROWS = 50
# Most rows of a table. More rows are for a program to read.
MAX_ROWS = 200
# Fewer ranks are compared by the table alone.
_MIN_HEAT_RANKS = 9
_SOURCES = {
    "recorded": "a recorded run",
    "imported": "an imported run",
    "simulated": "a simulation",
    "predicted": PREDICTED,
}
_SCRIPTS = ("tables.js", "readout.js", "controls.js", "timeline.js")


class ContentsEntry(NamedTuple):
    """A line of the table of contents: anchor and title of a section, and whether each
    rank has its own."""

    anchor: str  # Of a section of ranks without its end, `-RANK`.
    title: str
    of_rank: bool = False


@dataclass(frozen=True)
class Page:
    """Content of the page."""

    name: str  # Name of the trace.
    about: str  # Line on the source of the trace, its ranks and iterations.
    findings: Findings  # Findings of the rules.
    summary: Summary  # Figures of the trace.
    figures: list[KeyFigure]  # The most important figures.
    phases: Table | None  # Table of phases; None where there are no iterations.
    gpu: Table | None  # Table of the state of the GPUs; None where it was not recorded.
    ranks: list[RankView]  # Ranks that are shown.
    omitted_ranks: str | None  # Line on ranks that are not shown; None where all are.
    # `data:` address of the picture `ranks` of `ebbtide plot`; None where there are few
    # ranks.
    heat: str | None
    differences: Table  # Table of the ranks that differ.
    compared: Table | None  # Table of all ranks; None for a single rank.
    job: JobDescription  # Description of the job.
    missing: list[str]  # Lines on what was not recorded.
    notes: Sequence[str]  # Notes of the trace.

    @property
    def contents(self) -> list[ContentsEntry]:
        """The sections of the page in their order; of ranks: those that any has."""
        entries = [ContentsEntry("findings", "Findings")]
        entries += (
            [ContentsEntry("fleet", "Ranks")] if self.heat or self.differences else []
        )
        entries += (
            [ContentsEntry("section-timeline", "Timeline", True)] if self.ranks else []
        )
        entries += (
            [ContentsEntry("phases-of-all-ranks", "Phases")]
            if self.phases or self.gpu
            else []
        )
        titles = {
            section.name: section.title
            for view in self.ranks
            for section in view.sections
        }
        entries += [
            ContentsEntry(f"section-{name}", title, True)
            for name, title in titles.items()
        ]
        entries += (
            [ContentsEntry("compared", "Ranks compared")] if self.compared else []
        )
        return [*entries, ContentsEntry("job", "The job")]


def build_page(
    trace: Trace, findings: Findings, min_bytes: int, ranks: Sequence[int] = ()
) -> Page:
    """Collect the content of a trace's page.

    For `ranks` see `shown_ranks`, also for what it raises.
    """
    metrics = JobMetrics(trace)
    shown = shown_ranks(trace, ranks)
    summary = metrics.summary()
    numbers = [entry.rank for entry in shown]
    iterations, link = metrics.iterations(numbers), metrics.link(numbers)
    count = max(len(shown), 1)
    limits = DetailLimits(
        _MAX_POINTS // count, _MAX_BOXES // count, max(MAX_ROWS // count, _MIN_ROWS)
    )
    return Page(
        name=trace.name,
        about=_about(trace, summary),
        findings=findings,
        summary=summary,
        figures=key_figures(metrics, findings),
        phases=phase_table(trace, summary) if summary.iterations else None,
        gpu=gpu_table(summary.gpu) if summary.gpu is not None else None,
        ranks=[
            rank_view(metrics, entry, iterations, link, min_bytes, limits)
            for entry in shown
        ],
        omitted_ranks=_omitted(shown, len(trace.ranks) - len(shown)),
        heat=_heat_maps(trace),
        differences=differences_table(summary.rank_differences).first(MAX_ROWS),
        compared=rank_table(trace, metrics.ranks()).first(MAX_ROWS)
        if len(trace.ranks) > 1
        else None,
        job=describe_job(trace),
        missing=_missing(trace, summary),
        notes=trace.notes,
    )


def _heat_maps(trace: Trace) -> str | None:
    if len(trace.ranks) < _MIN_HEAT_RANKS or "ranks" not in seams.plugs("plots"):
        return None
    # Few traces have this many ranks: the pages of others do not wait for Matplotlib.
    from ebbtide.analysis.plot import draw, save

    file = io.BytesIO()
    try:
        save(draw([trace], kind="ranks"), file, "png")
    except TraceError:
        # It has no steady iteration.
        return None
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def _omitted(shown: Sequence[ShownRank], count: int) -> str | None:
    if not count:
        return None
    reasons = ", ".join(
        f"{entry.rank} ({entry.reason})" for entry in shown if entry.reason
    )
    drawn = f"drawn are {reasons}; " if reasons else ""
    return (
        f"{drawn}{count:,} more {'rank is' if count == 1 else 'ranks are'} not drawn: "
        "--rank N draws another one"
    )


def _about(trace: Trace, summary: Summary) -> str:
    ranks = f"{len(trace.ranks)} rank{'' if len(trace.ranks) == 1 else 's'}"
    parts = [_SOURCES.get(trace.meta.source or "", "a run"), ranks]
    if summary.iterations:
        warmup = (
            f", the first {summary.warmup_iterations} left out as warm-up"
            if summary.warmup_iterations
            else ""
        )
        parts.append(f"{summary.iterations} iterations{warmup}")
    return " · ".join(parts)


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


def write_report(
    trace: Trace,
    findings: Findings,
    output: Path,
    min_bytes: int,
    ranks: Sequence[int] = (),
    force: bool = False,
) -> None:
    """Write the page of a trace, complete or not at all; for `ranks` see `shown_ranks`.
    Raises UserError where the output exists (without `force`) or cannot be written."""
    with new_output(output, force, Path.is_file, "a file") as new:
        new.write_text(
            render_page(build_page(trace, findings, min_bytes, ranks)), encoding="utf-8"
        )


def render_page(content: Page) -> str:
    """Return the page as HTML. All text of a trace is escaped, and only scripts run
    whose hashes the policy lists."""
    environment = Environment(
        loader=PackageLoader("ebbtide.analysis.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # Bokeh resolves references in their order.
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False}
    environment.filters |= {"ms": ms_text, "code": _code, "sentence": _sentence}
    scripts = [_source(environment, name) for name in _SCRIPTS]
    if any(view.timeline for view in content.ranks):
        # bokeh.min.js alone, without widgets, tables and fonts.
        scripts = [
            *Resources(mode="inline", components=["bokeh"], log_level="warn").js_raw,
            *scripts,
        ]
    hashes = (
        base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        for script in scripts
    )
    sources = " ".join(f"'sha256-{script}'" for script in hashes)
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src "
        f"{sources}"
    )
    template = environment.get_template("page.html.j2")
    styles = color_styles() + _source(environment, "page.css")
    return template.render(page=content, policy=policy, scripts=scripts, styles=styles)


def _code(text: str) -> Markup:
    """Return text with its `commands` as code."""
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def _sentence(text: str) -> Markup:
    """Return text with a capital if it begins with a word.

    A command, a file or h2d is not changed.
    """
    word = text.split(" ")[0].rstrip(",:;")
    return _code(
        text[:1].upper() + text[1:] if word.isalpha() and word != "ebbtide" else text
    )


def _source(environment: Environment, name: str) -> str:
    assert environment.loader is not None
    return environment.loader.get_source(environment, name)[0]
