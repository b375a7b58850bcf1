"""Screens over the view: help, findings with evidence, the output of the job."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import Screen
from textual.widgets import Footer, Static

from ebbtide.cli.live_view.marks import legend
from ebbtide.cli.live_view.snapshot import Snapshot
from ebbtide.cli.live_view.table_panels import finding_line
from ebbtide.cli.live_view.watched import WatchedLog

_PERIOD_S = 1.0
_HELP = """
Phases     A row per iteration, the newest at the top, as long as it took. Figures of a rank are medians
           over the last iterations (100 at most), without the warm-up.
Memory     Memory of the rank's device over the iterations that are shown, up to its capacity, with the
           phase below each column. On a CPU: the process's heap, of the host's memory.
Link       Bytes per second to the device (h2d) and to the host (d2h) by the counters of the card, up to
           the peak of the link; utilization and power of the GPU by NVML. Copies of `--transfers` are
           added when the recording is finished.
Windows    Parts of an iteration in which at least 1 GiB of device memory is free in every iteration, and
           how idle the link is then.
Ranks      Newest iteration of each rank. A silent rank runs, but has recorded nothing for more than ten
           seconds and five iterations.
Findings   Rules of `ebbtide findings`, applied to the last iterations about every ten seconds.

Keys       n p, right left    next and previous rank          + -, up down    more and fewer iterations
           space              pause                           f               findings with evidence
           l                  output of the job (--watch)     q, Escape       back, quit
"""


class _Page(Screen[None]):
    """A page that scrolls over the view."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q", "app.pop_screen", "back")]

    def __init__(self, text: Text) -> None:
        super().__init__()
        self._text = text

    def compose(self) -> ComposeResult:
        """Make the page."""
        with VerticalScroll():
            yield Static(self._text, id="page")
        yield Footer(compact=True)


class HelpScreen(_Page):
    """The meaning of panels and keys."""

    def __init__(self) -> None:
        super().__init__(Text.assemble(legend(), "\n", _HELP))


class FindingsScreen(_Page):
    """The findings of a snapshot, with evidence and advice."""

    def __init__(self, snapshot: Snapshot) -> None:
        text = Text()
        for number, seen in enumerate(snapshot.findings or (), 1):
            text.append(f"{number}. {finding_line(seen).strip()}\n", "bold")
            for evidence in seen.finding.evidence:
                text.append(f"   - {evidence}\n")
            text.append(f"   {seen.finding.advice}\n\n")
        if not snapshot.findings:
            text.append("No rule has found anything yet." if snapshot.findings is None else "No rule found anything.")
        else:
            text.append(
                "The time before a title is the most that an iteration would gain. Gains overlap; do not add them."
            )
        super().__init__(text)


class LogScreen(_Page):
    """The end of the output of the job, kept up to date."""

    def __init__(self, output: WatchedLog) -> None:
        super().__init__(_tail(output))
        self._output = output

    def on_mount(self) -> None:
        """Read the output again and again."""
        self.set_interval(_PERIOD_S, self._update)
        self.query_one(VerticalScroll).scroll_end(animate=False)

    def _update(self) -> None:
        scroll = self.query_one(VerticalScroll)
        at_end = scroll.is_vertical_scroll_end
        self.query_one("#page", Static).update(_tail(self._output))
        if at_end:
            scroll.scroll_end(animate=False)


def _tail(output: WatchedLog) -> Text:
    return Text.assemble((f"{output.path}\n", "bold"), Text.from_ansi(output.tail()))
