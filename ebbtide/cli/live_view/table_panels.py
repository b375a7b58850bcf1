"""The panels with text: title, windows, ranks and findings."""

from __future__ import annotations

from rich.text import Text

from ebbtide.analysis.live import LiveRank
from ebbtide.analysis.metrics.devices import ran_on_cpu
from ebbtide.analysis.metrics.link_throughput import DIRECTIONS
from ebbtide.cli.live_view.marks import DIM, TITLE, lines, title
from ebbtide.cli.live_view.snapshot import RecordingSnapshot, SeenFinding, SelectedRank
from ebbtide.units import bytes_text, ms_text, range_text

_STATES = {
    "silent": "nothing was recorded for long",
    "finishing": "the job has ended, the trace is being written",
    "cut off": "the job has ended, and nobody finishes the trace",
    "gone": "the trace was removed, since nothing was recorded",
}


def draw_header(snapshot: RecordingSnapshot, view: SelectedRank | None, paused: bool, width: int) -> Text:
    """Draw the trace, its state, and the selected rank."""
    row = Text.assemble((snapshot.path.name, "bold"), "  ", ("paused" if paused else snapshot.state, "reverse"))
    if snapshot.behind:
        row.append("  reading what was recorded so far ...")
    if view is not None:
        figures = view.figures
        row.append(f"  rank {figures.rank} of {len(snapshot.ranks)} on {figures.device}")
        if figures.iteration is not None:
            row.append(f"  iteration {figures.iteration:,}  median {ms_text(figures.median_ms.get('iteration'))}")
    if snapshot.state in _STATES:
        row.append(f"  {_STATES[snapshot.state]}", DIM)
    return lines([row], width, 1)


def draw_windows(view: SelectedRank, width: int, height: int) -> Text:
    """Draw the windows of free memory that recur in every iteration, the longest first."""
    windows = view.snapshot.windows
    if windows is None:
        return lines([title("Windows", "looking ...")], width, height)
    memory = "of host memory free" if windows.memory == "host" else "free"
    name = f"Windows with {bytes_text(windows.min_bytes)} {memory} in every iteration"
    if windows.missing:
        return lines([title("Windows", windows.missing[0])], width, height)
    own = [window for window in windows.guaranteed if window.rank == view.figures.rank]
    if not own:
        return lines([title(name), Text("none", DIM)], width, height)
    rows = [title(name)]
    for window in sorted(own, key=lambda w: w.start_ms - w.end_ms):
        idle = [
            f"{direction} idle {100 * share:.0f} %"
            for direction, share in (("h2d", window.h2d_idle_share), ("d2h", window.d2h_idle_share))
            if share is not None
        ]
        span = range_text(window.start_ms, window.end_ms)
        rows.append(Text(f"{window.phase or '-':<9} {span:<22} {bytes_text(window.free_bytes):>10}  {'  '.join(idle)}"))
    return lines(rows, width, height)


def draw_ranks(view: SelectedRank, width: int, height: int) -> Text:
    """Draw a row per rank, those around the selected one where not all have room."""
    ranks = view.snapshot.ranks
    on_cpu = ran_on_cpu(view.trace)
    header = f"{'rank':>5} {'device':<6} {'state':<9} {'iteration':>9} {'last':>9} {'update':>9} {'free':>9}"
    header += "" if on_cpu else f" {'h2d':>5} {'d2h':>5} {'GPU':>5}"
    selected = ranks.index(view.figures)
    shown = max(height - 1, 1)
    first = max(0, min(selected - shown // 2, len(ranks) - shown))
    rows = [Text(header, TITLE)]
    for figures in ranks[first : first + shown]:
        is_selected = figures is view.figures and len(ranks) > 1
        rows.append(Text((">" if is_selected else " ") + _rank_row(figures, on_cpu), TITLE if is_selected else ""))
    return lines(rows, width, height)


def _rank_row(figures: LiveRank, on_cpu: bool) -> str:
    free = None if figures.memory is None else figures.memory.free_bytes
    iteration = "-" if figures.iteration is None else f"{figures.iteration:,}"
    row = f"{figures.rank:>4} {figures.device or '-':<6} {figures.state:<9} {iteration:>9}"
    row += f" {ms_text(figures.last_ms.get('iteration')):>9} {ms_text(figures.last_ms.get('update')):>9}"
    row += f" {bytes_text(free):>9}"
    if on_cpu:
        return row
    shares = [link.share if (link := figures.link.get(direction)) else None for direction in DIRECTIONS]
    used = figures.gpu.get("utilization_percent")
    percents = [None if share is None else 100 * share for share in shares] + [used]
    return row + "".join(f" {'-' if percent is None else f'{percent:.0f} %':>5}" for percent in percents)


def draw_findings(snapshot: RecordingSnapshot, width: int, height: int) -> Text:
    """Draw a row per finding, the largest gain first."""
    findings = snapshot.findings
    if findings is None:
        return lines([title("Findings", "looking ...")], width, height)
    of = "of the trace" if snapshot.state == "complete" else "of the last iterations"
    rows = [title(f"Findings {of}: {len(findings)}", "f: all of them with evidence" if findings else "")]
    rows += [Text(finding_line(seen)) for seen in findings]
    return lines(rows, width, height)


def finding_line(seen: SeenFinding) -> str:
    """Return a finding as one line: its potential gain, its title, and since when it is true."""
    gain = seen.finding.potential_gain_ms
    since = "" if seen.since is None else f" (since iteration {seen.since:,})"
    return f"{'-' if gain is None else ms_text(gain):>10}  {seen.finding.title}{since}"


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
