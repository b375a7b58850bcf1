"""Screens over the view: help, findings with evidence, the output of the job."""

from collections.abc import Callable
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import Screen
from textual.widgets import Footer, Static

from ebbtide.features.live.view.panels import finding_line, legend
from ebbtide.features.live.view.snapshot import RecordingSnapshot, tail
from ebbtide.profiler.recording.launch import BackgroundJob

_PERIOD_S = 1.0
_HELP = """
Phases    A row per iteration, the newest at the top, as long as it took.
          Figures of a rank are medians over its last iterations (at most
          100), without the warm-up.
Memory    Memory of the rank's device in these iterations, up to its
          capacity, above the phase of each column. Of a job on the CPU:
          the heap of its process, and the memory of the host.
Link      Bytes per second to the device (h2d) and to the host (d2h), by the
          counters of the card, as a share of the peak of the link. Then
          utilization and power of the GPU. Copies of --transfers are added
          when the recording is finished.
Windows   Parts in which at least 1 GiB of device memory is free in every
          iteration, the longest first, and how idle the link is then.
Ranks     The newest iteration of each rank; h2d and d2h as shares of the
          peak. A silent rank runs, but has recorded nothing for more than
          ten seconds and five of its iterations.
Findings  The rules of `ebbtide findings` on the last iterations, every ten
          seconds; of a finished trace on all iterations.

Keys      n p, right left   next rank, previous rank
          + -, up down      more iterations, fewer
          space             pause and go on
          f                 findings with evidence and advice
          l                 output of the job (profile --watch)
          q                 quit (the job of profile --watch goes on)
          q, Escape         leave this page
          Ctrl-C            quit; with profile --watch: interrupt the job
"""


class ViewPage(Screen[None]):
    """A page that scrolls over the view.

    `from_end`: it begins at its end, and is kept up to date.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "app.pop_screen", "back")
    ]

    def __init__(self, draw: Callable[[], Text], from_end: bool = False) -> None:
        super().__init__()
        self._draw = draw
        self._from_end = from_end

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield Static(self._draw(), id="page")
        yield Footer(compact=True)

    def on_mount(self) -> None:
        if self._from_end:
            self.set_interval(_PERIOD_S, self._update)
            self.query_one(VerticalScroll).scroll_end(animate=False)

    def _update(self) -> None:
        scroll = self.query_one(VerticalScroll)
        at_end = scroll.is_vertical_scroll_end
        self.query_one("#page", Static).update(self._draw())
        if at_end:
            scroll.scroll_end(animate=False)


def help_text() -> Text:
    """Return the meaning of panels and keys."""
    return Text.assemble(legend(), "\n", _HELP)


def findings_text(snapshot: RecordingSnapshot) -> Text:
    """Return the findings of a snapshot, with evidence and advice."""
    if not snapshot.findings:
        return Text(
            "No rule has found anything yet."
            if snapshot.findings is None
            else "No rule found anything."
        )
    text = Text()
    for number, seen in enumerate(snapshot.findings, 1):
        text.append(f"{number}. {finding_line(seen).strip()}\n", "bold")
        for evidence in seen.finding.evidence:
            text.append(f"   - {evidence}\n")
        text.append(f"   {seen.finding.advice}\n\n")
    return text.append(
        "The time before a title is the most that an iteration would gain. Gains "
        "overlap; do not add them."
    )


def log_text(job: BackgroundJob) -> Text:
    """Return the end of the output of the job."""
    return Text.assemble((f"{job.log}\n", "bold"), Text.from_ansi(tail(job.log)))
