"""The panels of the view: charts of phases, memory and link by letters and blocks; text
on windows, ranks, findings."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np
from rich.text import Text

from ebbtide.analysis.metrics.devices import memory_timeline, ran_on_cpu
from ebbtide.analysis.metrics.iterations import intervals
from ebbtide.analysis.metrics.link_throughput import DIRECTIONS, traffic
from ebbtide.analysis.metrics.missing import NO_MEMORY, no_iterations, no_link
from ebbtide.analysis.tables.table import Table
from ebbtide.analysis.tables.text import table_lines
from ebbtide.analysis.tables.windows import recurring_table
from ebbtide.analysis.timeline.styles import COLORS
from ebbtide.analysis.timeseries.step_functions import Floats, peak_between
from ebbtide.features.live.trace import LiveRank, series
from ebbtide.features.live.view.snapshot import (
    RecordingSnapshot,
    SeenFinding,
    SelectedRank,
)
from ebbtide.foreign_text import masked
from ebbtide.phases import ITERATION_PARTS
from ebbtide.units import NO_VALUE, bytes_text, ms_text, rate_text

LETTERS = {"forward": "F", "backward": "B", "update": "U", "other": "·"}
_LEVELS = " ▁▂▃▄▅▆▇█"
TITLE = "bold"
DIM = "dim"


def phase_style(phase: str) -> str:
    """Return the style of a letter of a phase: dark on the colour that the phase has in
    plots."""
    foreground = "#d3d9de" if phase == "other" else "#101418"
    return f"{foreground} on {COLORS[phase].dark}"


def legend() -> Text:
    """Return the letters of the phases with their names."""
    text = Text()
    for phase in ITERATION_PARTS:
        text.append(f" {LETTERS[phase]} ", phase_style(phase))
        text.append(f" {phase}  ")
    return text


def level_rows(shares: Iterable[float], height: int) -> list[str]:
    """Draw columns of blocks from 0 to 1, as rows from the top.

    NaN is empty; above 0, at least the lowest block is drawn.
    """
    steps = (len(_LEVELS) - 1) * height
    levels = [
        0 if math.isnan(share) else min(steps, math.ceil(share * steps - 1e-9))
        for share in shares
    ]
    full = len(_LEVELS) - 1
    return [
        "".join(_LEVELS[min(full, max(0, level - row * full))] for level in levels)
        for row in reversed(range(height))
    ]


def lines(rows: Sequence[Text], width: int, height: int) -> Text:
    """Join rows to a text of at most a width and a height.

    What does not fit is cut off.
    """
    kept = list(rows)[: max(height, 0)]
    for row in kept:
        row.plain = masked(row.plain)
        row.truncate(width, overflow="ellipsis")
    return Text("\n", no_wrap=True, overflow="crop").join(kept)


def title(name: str, details: str = "") -> Text:
    """Return the first row of a panel."""
    return Text.assemble((name, TITLE), ("  " + details if details else "", DIM))


# Width of the labels before charts over time: these have one time axis.
_LABEL = 23
# Tables of a narrower screen are cut off.
_TABLE_WIDTH = 120
# Memory that never uses so much of the capacity has a scale of its own.
_MIN_SHARE_OF_CAPACITY = 0.1
_STATES = {
    "silent": "nothing was recorded for long",
    "finishing": "the job has ended, the trace is being written",
    "cut off": "the job has ended, and nobody finishes the trace",
    "gone": "the trace was removed, since nothing was recorded",
}


def draw_phases(view: SelectedRank, width: int, height: int) -> Text:
    """Draw the newest iterations, a row each and the newest first, in the scale of the
    longest."""
    times = intervals(view.trace, view.figures.rank)
    spans = times.spans[["iteration", "start_ns", "end_ns"]].tail(
        min(view.iterations, max(height - 1, 1))
    )
    if spans.empty:
        return lines(
            [title("Phases"), Text(no_iterations(view.trace), DIM)], width, height
        )
    medians = view.figures.median_ms
    details = "  ".join(
        f"{LETTERS[part]} {part} {ms_text(medians[part]).removesuffix(' ms')}"
        for part in LETTERS
        if part in medians
    )
    of_medians = " (medians)" if len(details) + 20 <= width else ""
    lengths_ns = (spans["end_ns"] - spans["start_ns"]).tolist()
    labels = [
        f"{number} {ms_text(ns / 1e6):>9} "
        for number, ns in zip(spans["iteration"], lengths_ns, strict=True)
    ]
    label_width = max(map(len, labels))
    scale = max(width - label_width, 0) / max(*lengths_ns, 1)
    rows = []
    for label, start_ns, length_ns in zip(
        labels, spans["start_ns"].tolist(), lengths_ns, strict=True
    ):
        edges = series.column_edges(
            start_ns, start_ns + length_ns, round(length_ns * scale)
        )
        rows.append(
            Text(label.rjust(label_width)).append_text(
                _letters(series.phase_columns(times, edges))
            )
        )
    rows.append(title("Phases", f"{details} ms{of_medians}" if details else ""))
    return lines(rows[::-1], width, height)


def _letters(phases: Iterable[str | None]) -> Text:
    """Draw a letter per column on the colour of its phase."""
    text = Text()
    for phase, run in groupby(phases):
        text.append(
            (LETTERS[phase] if phase else " ") * len(list(run)),
            phase_style(phase) if phase else "",
        )
    return text


def draw_memory(view: SelectedRank, width: int, height: int) -> Text:
    """Draw memory over time, the capacity at the top, the phases below.

    Phases are drawn by letters.
    """
    memory = view.figures.memory
    if memory is None or view.range_ns is None:
        return lines([title("Memory"), Text(NO_MEMORY, DIM)], width, height)
    columns = max(width - _LABEL, 1)
    edges = series.column_edges(*view.range_ns, columns)
    sizes = peak_between(
        *memory_timeline(view.trace, view.figures.rank, memory.pool),
        edges[:-1],
        edges[1:],
    )
    peak = float(np.nanmax(sizes)) if np.isfinite(sizes).any() else 1.0
    capacity = memory.capacity_bytes
    at_capacity = capacity is not None and peak >= _MIN_SHARE_OF_CAPACITY * capacity
    top = float(capacity) if capacity is not None and at_capacity else peak
    details = f"{memory.pool} {bytes_text(memory.bytes)}"
    if capacity is not None:
        details += f" of {bytes_text(capacity)}, free {bytes_text(memory.free_bytes)}"
        details += f", least free {bytes_text(memory.lowest_free_bytes)}"
    if not at_capacity:
        details += "; scale to the peak"
    chart = level_rows(sizes / top if top else sizes, max(height - 2, 1))
    labels = [bytes_text(top), *[""] * (len(chart) - 1)]
    rows = [title("Memory", details)]
    color = memory.pool if memory.pool in COLORS else "device"
    for label, row in zip(labels, chart, strict=True):
        rows.append(Text(f"{label:>{_LABEL - 1}} ").append(row, COLORS[color].dark))
    times = intervals(view.trace, view.figures.rank, device_times=False)
    phases = Text(f"{'phase':>{_LABEL - 1}} ").append_text(
        _letters(series.phase_columns(times, edges))
    )
    return lines([*rows, phases], width, height)


def draw_link(view: SelectedRank, width: int, height: int) -> Text:
    """Draw the rate of the link per direction, and the utilization of the GPU.

    The rate is a share of the link's peak.
    """
    rank, figures = view.figures.rank, view.figures
    if view.range_ns is None or not (figures.link or figures.gpu):
        return lines([title("Link", no_link(view.trace, [rank]))], width, height)
    edges = series.column_edges(*view.range_ns, max(width - _LABEL, 1))
    charts: list[tuple[str, str, Floats]] = []
    for direction in DIRECTIONS:
        if (
            moved := traffic(view.trace, rank, direction)
        ) is not None and direction in figures.link:
            link = figures.link[direction]
            rates = moved.bytes(edges[:-1], edges[1:]) / (np.diff(edges) / 1e9)
            # The peak of the link, else the largest of the rates.
            scale = link.peak_bytes_per_s or float(np.nan_to_num(rates).max())
            share = "" if link.share is None else f"{100 * link.share:.0f} %"
            label = f"{direction} {rate_text(link.bytes_per_s):>11} {share:>6}"
            charts.append((label, direction, rates / scale if scale else rates))
    if "utilization_percent" in figures.gpu:
        used = series.gpu_columns(view.trace, rank, "utilization_percent", edges)
        power = f"{figures.gpu['power_w']:.0f} W" if "power_w" in figures.gpu else ""
        charts.append(
            (
                f"GPU {power:>11} {figures.gpu['utilization_percent']:>4.0f} %",
                "compute",
                used / 100,
            )
        )
    peak = next(
        (
            link.peak_bytes_per_s
            for link in figures.link.values()
            if link.peak_bytes_per_s
        ),
        None,
    )
    details = (
        f"full height is the peak of {rate_text(peak)} per direction"
        if peak
        else "peak not known"
    )
    rows = [
        title(
            "Link and GPU" if "utilization_percent" in figures.gpu else "Link", details
        )
    ]
    of_each = max(1, (height - 1) // max(len(charts), 1))
    for label, color, shares in charts:
        # A row stays free between charts that have several.
        chart = [" " * len(shares)] * (of_each > 1) + level_rows(
            shares, max(of_each - 1, 1)
        )
        for number, row in enumerate(chart):
            text = label if number == len(chart) - 1 else ""
            rows.append(Text(f"{text:<{_LABEL}}").append(row, COLORS[color].dark))
    return lines(rows, width, height)


def draw_header(
    snapshot: RecordingSnapshot, view: SelectedRank | None, paused: bool, width: int
) -> Text:
    """Draw the trace, its state, and the selected rank."""
    row = Text.assemble(
        (snapshot.path.name, "bold"),
        "  ",
        ("paused" if paused else snapshot.state, "reverse"),
    )
    if snapshot.behind:
        row.append("  reading what was recorded so far ...")
    if view is not None:
        figures = view.figures
        row.append(
            f"  rank {figures.rank} of {len(snapshot.ranks)} on {figures.device}"
        )
        if figures.iteration is not None:
            row.append(
                f"  iteration {figures.iteration:,}  median "
                f"{ms_text(figures.median_ms.get('iteration'))}"
            )
    if snapshot.state in _STATES:
        row.append(f"  {_STATES[snapshot.state]}", DIM)
    return lines([row], width, 1)


def draw_windows(view: SelectedRank, width: int, height: int) -> Text:
    """Draw windows of free memory that recur in every iteration, the longest first."""
    windows = view.snapshot.windows
    if windows is None:
        return lines([title("Windows", "looking ...")], width, height)
    if windows.missing:
        return lines([title("Windows", windows.missing[0])], width, height)
    table = recurring_table(windows, [view.figures.rank])
    table = replace(
        table,
        all_rows=sorted(
            table.all_rows, key=lambda window: window.start_ms - window.end_ms
        ),
    )
    if not table:
        rows = [Text("none", DIM)]
    elif height > 2:
        heading, *others = table_lines(table, max(width, _TABLE_WIDTH))
        rows = [Text(heading, TITLE), *map(Text, others)]
    else:
        rows = [first_row(table)]
    return lines([title("Windows", table.title), *rows], width, height)


def first_row(table: Table) -> Text:
    """Return the first row of a table as a line.

    Each figure has its label and unit.
    """
    figures = {True: "{0.label} {1.text} {0.unit}", False: "{1.text}"}
    parts = [
        figures[column.is_number].format(column, column.cells[0])
        for column in table.columns
    ]
    return Text("  ".join(parts))


def draw_ranks(view: SelectedRank, width: int, height: int) -> Text:
    """Draw a row per rank, those around the selected one where not all have room."""
    ranks = view.snapshot.ranks
    on_cpu = ran_on_cpu(view.trace)
    header = (
        f"{'rank':>5} {'device':<6} {'state':<9} {'iteration':>9} {'last':>9} "
        f"{'update':>9} {'free':>9}"
    )
    header += "" if on_cpu else f" {'h2d':>5} {'d2h':>5} {'GPU':>5}"
    selected = ranks.index(view.figures)
    shown = max(height - 1, 1)
    first = max(0, min(selected - shown // 2, len(ranks) - shown))
    rows = [Text(header, TITLE)]
    for figures in ranks[first : first + shown]:
        is_selected = figures is view.figures and len(ranks) > 1
        rows.append(
            Text(
                (">" if is_selected else " ") + _rank_row(figures, on_cpu),
                TITLE if is_selected else "",
            )
        )
    return lines(rows, width, height)


def _rank_row(figures: LiveRank, on_cpu: bool) -> str:
    free = None if figures.memory is None else figures.memory.free_bytes
    iteration = NO_VALUE if figures.iteration is None else f"{figures.iteration:,}"
    row = (
        f"{figures.rank:>4} {figures.device or NO_VALUE:<6} {figures.state:<9} "
        f"{iteration:>9}"
    )
    row += (
        f" {ms_text(figures.last_ms.get('iteration')):>9} "
        f"{ms_text(figures.last_ms.get('update')):>9}"
    )
    row += f" {bytes_text(free):>9}"
    if on_cpu:
        return row
    shares = [
        link.share if (link := figures.link.get(direction)) else None
        for direction in DIRECTIONS
    ]
    used = figures.gpu.get("utilization_percent")
    percents = [None if share is None else 100 * share for share in shares] + [used]
    texts = (NO_VALUE if part is None else f"{part:.0f} %" for part in percents)
    return row + "".join(f" {text:>5}" for text in texts)


def draw_findings(snapshot: RecordingSnapshot, width: int, height: int) -> Text:
    """Draw a row per finding, the largest gain first."""
    findings = snapshot.findings
    if findings is None:
        return lines([title("Findings", "looking ...")], width, height)
    of = "of the trace" if snapshot.state == "complete" else "of the last iterations"
    rows = [
        title(
            f"Findings {of}: {len(findings)}",
            "f: all of them with evidence" if findings else "",
        )
    ]
    rows += [Text(finding_line(seen)) for seen in findings]
    return lines(rows, width, height)


def finding_line(seen: SeenFinding) -> str:
    """Return a finding as one line: its potential gain, its title, and since when it is
    true."""
    gain = seen.finding.potential_gain_ms
    since = "" if seen.since is None else f" (since iteration {seen.since:,})"
    return f"{ms_text(gain):>10}  {seen.finding.title}{since}"


def draw_waiting(snapshot: RecordingSnapshot, width: int, height: int) -> Text:
    """Draw why there is nothing to show."""
    reasons = {
        "waiting": "Waiting for the first phase: nothing was recorded yet.",
        "cut off": "Nothing was recorded, and the job has ended.",
        "gone": "The trace was removed, since nothing was recorded.",
    }
    if snapshot.state == "waiting" and not snapshot.path.exists():
        reason = f"Waiting for {snapshot.path.name}, which does not exist yet."
    else:
        reason = reasons.get(snapshot.state, "This trace has no ranks.")
    return lines([Text(reason)], width, height)
