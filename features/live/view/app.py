"""The terminal app: panels of one rank.

A thread that reads snapshots keeps them up to date.
"""

from collections.abc import Callable
from functools import partial
from threading import Event
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, Vertical
from textual.geometry import Size
from textual.widget import Widget
from textual.widgets import Footer

from ebbtide.errors import UserError
from ebbtide.features.live.view import panels
from ebbtide.features.live.view.screens import (
    ViewPage,
    findings_text,
    help_text,
    log_text,
)
from ebbtide.features.live.view.snapshot import (
    MAX_ITERATIONS,
    RecordingSnapshot,
    SelectedRank,
    SnapshotReader,
)
from ebbtide.profiler.recording.launch import BackgroundJob

ZOOMS = (1, 2, 5, 10, 20, 50, MAX_ITERATIONS)
_PAGE_ACTIONS = ("pop_screen", "interrupt")
_Draw = Callable[[SelectedRank, int, int], Text]


class Panel(Widget):
    """A part of the screen that is drawn from the newest snapshot, with `count_rows`
    where its height is `auto`."""

    def __init__(
        self,
        draw: Callable[[int, int], Text],
        panel_id: str,
        count_rows: Callable[[], int] = int,
    ) -> None:
        super().__init__(id=panel_id)
        self._draw = draw
        self._count_rows = count_rows

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return self._count_rows()

    def render(self) -> Text:
        return self._draw(self.size.width, self.size.height)


class LiveView(App[str]):
    """The view of one recording, which ends with its job if it has one. Its result is
    an error to print, or None."""

    TITLE = "ebbtide watch"
    ENABLE_COMMAND_PALETTE = False
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (160, "-wide")]  # noqa: RUF012
    VERTICAL_BREAKPOINTS = [(0, "-low"), (34, "-tall")]  # noqa: RUF012
    CSS = """
    Screen { background: $background; }
    #header { height: 1; }
    #body { height: 1fr; }
    #left, #right { height: 1fr; }
    .-narrow #body { layout: vertical; }
    .-narrow #right { height: 8; }
    .-narrow.-tall #right { height: 15; }
    .-wide #body { layout: horizontal; }
    .-wide #left { width: 1fr; padding-right: 2; }
    .-wide #right { width: 80; }
    #waiting { display: none; height: 1fr; }
    #phases { height: 1fr; }
    #memory { height: 6; }
    .-narrow.-tall #memory { height: 9; }
    #link { height: 4; }
    .-plain #link { height: 1; }
    #windows { height: 2; }
    .-narrow.-tall #windows { height: 5; }
    #ranks { height: 3; }
    .-narrow.-tall #ranks { height: 5; }
    #findings { height: 1fr; }
    .-wide #memory { height: 1fr; }
    .-wide #link { height: 1fr; max-height: 13; }
    .-wide.-plain #link { height: 1; }
    .-wide #windows { height: 8; margin-bottom: 1; }
    .-wide #ranks { height: auto; max-height: 20; margin-bottom: 1; }
    .-wide #phases, .-wide #memory { margin-bottom: 1; }
    .-empty #body { display: none; }
    .-empty #waiting { display: block; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("n,right", "select_rank(1)", "rank", key_display="n p"),
        Binding("p,left", "select_rank(-1)", show=False),
        Binding("plus,equals_sign,up", "zoom(1)", "iterations", key_display="+ -"),
        Binding("minus,down", "zoom(-1)", show=False),
        Binding("space", "pause", "pause"),
        Binding("f", "findings", "findings"),
        Binding("l", "log", "output"),
        Binding("question_mark,h", "help", "help", key_display="?"),
        Binding("q", "quit", "quit"),
        Binding("ctrl+c", "interrupt", show=False, priority=True),
    ]

    def __init__(
        self,
        reader: SnapshotReader,
        snapshot: RecordingSnapshot,
        job: BackgroundJob | None = None,
    ) -> None:
        super().__init__()
        self.animation_level = "none"
        self.snapshot = snapshot
        self.iterations = 10
        self.paused = False
        self._reader = reader
        self._job = job
        self._rank = snapshot.ranks[0].rank if snapshot.ranks else 0
        self._view: SelectedRank | None = None
        self._wake = Event()
        self._ends = False

    def compose(self) -> ComposeResult:
        yield Panel(
            lambda w, h: panels.draw_header(self.snapshot, self._view, self.paused, w),
            "header",
        )
        yield Panel(lambda w, h: panels.draw_waiting(self.snapshot, w, h), "waiting")
        with Container(id="body"):
            with Vertical(id="left"):
                yield self._panel(panels.draw_phases, "phases")
                yield self._panel(panels.draw_memory, "memory")
                yield self._panel(panels.draw_link, "link")
            with Vertical(id="right"):
                yield self._panel(panels.draw_windows, "windows")
                yield self._panel(
                    panels.draw_ranks, "ranks", lambda: len(self.snapshot.ranks) + 1
                )
                yield Panel(
                    lambda w, h: panels.draw_findings(self.snapshot, w, h), "findings"
                )
        yield Footer(compact=True)

    def _panel(
        self, draw: _Draw, panel_id: str, count_rows: Callable[[], int] = int
    ) -> Panel:
        return Panel(
            lambda w, h: Text() if self._view is None else draw(self._view, w, h),
            panel_id,
            count_rows,
        )

    def on_mount(self) -> None:
        self._show()
        self.run_worker(self._follow, thread=True, name="follow", exit_on_error=False)

    def on_unmount(self) -> None:
        self._ends = True
        self._wake.set()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Show keys of the output only where the view runs the job.

        Show keys of ranks where there are several.
        """
        if len(self.screen_stack) > 1:
            # A page lies over the view.
            return action in _PAGE_ACTIONS
        if action == "log":
            return self._job is not None
        if action == "select_rank":
            return len(self.snapshot.ranks) > 1
        return True

    def _follow(self) -> None:
        """Read snapshots until the app ends."""
        while not self._ends:
            self._wake.wait(0.0 if self.snapshot.behind else self._reader.period_s)
            self._wake.clear()
            if self._job is not None and self._job.is_finished():
                self.call_from_thread(self.exit)
                return
            if self._ends or self.paused:
                continue
            try:
                snapshot = self._reader.read(self._rank)
            except UserError as error:
                self.call_from_thread(self.exit, str(error), 2)
                return
            if snapshot is not None and not self._ends:
                self.call_from_thread(self._take, snapshot)

    def _take(self, snapshot: RecordingSnapshot) -> None:
        if self.paused:
            return
        several = len(self.snapshot.ranks) > 1
        self.snapshot = snapshot
        self._show()
        if (len(snapshot.ranks) > 1) != several:
            self.refresh_bindings()

    def _show(self) -> None:
        """Draw all panels anew."""
        figures = {entry.rank: entry for entry in self.snapshot.ranks}
        self._view = view = None
        if self.snapshot.trace is not None and figures:
            chosen = figures.get(self._rank, self.snapshot.ranks[0])
            self._view = view = SelectedRank(
                self.snapshot, chosen, self.snapshot.trace, self.iterations
            )
        self.set_class(view is None, "-empty")
        self.set_class(
            view is not None and not (view.figures.link or view.figures.gpu), "-plain"
        )
        for panel in self.query(Panel):
            panel.refresh(layout=panel.id == "ranks")

    def action_select_rank(self, step: int) -> None:
        """Select the next rank, or the one before."""
        ranks = [figures.rank for figures in self.snapshot.ranks]
        if ranks:
            index = ranks.index(self._rank) if self._rank in ranks else 0
            self._rank = ranks[(index + step) % len(ranks)]
            self._show()
            # The windows are one rank's.
            self._wake.set()

    def action_zoom(self, step: int) -> None:
        self.iterations = ZOOMS[
            min(max(ZOOMS.index(self.iterations) + step, 0), len(ZOOMS) - 1)
        ]
        self._show()

    def action_pause(self) -> None:
        """Stop reading, so that what is shown stays; or go on."""
        self.paused = not self.paused
        self._wake.set()
        self._show()

    def action_findings(self) -> None:
        self.push_screen(ViewPage(partial(findings_text, self.snapshot)))

    def action_help(self) -> None:
        """Show what the panels and keys mean."""
        self.push_screen(ViewPage(help_text))

    def action_log(self) -> None:
        """Show the end of the job's output."""
        if self._job is not None:
            self.push_screen(ViewPage(partial(log_text, self._job), from_end=True))

    def action_interrupt(self) -> None:
        """Pass Ctrl-C on to the job where the view runs it; else leave the view."""
        if self._job is not None:
            self._job.interrupt()
        else:
            self.exit()
