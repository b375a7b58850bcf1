"""Reads one snapshot of a recording after the other for the view, and the end of the
output of its job."""

import os
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ebbtide.analysis.findings import Finding, find
from ebbtide.analysis.metrics.windows import Windows, find_windows
from ebbtide.errors import TraceError, UserError
from ebbtide.features.live.trace import LiveRank, LiveTrace, State
from ebbtide.features.live.trace.series import time_range
from ebbtide.profiler.recording.lock import collector_runs
from ebbtide.profiler.trace import Trace
from ebbtide.profiler.trace.files import META, read_meta

# Iterations that are kept: the most that the view can show.
MAX_ITERATIONS = 100
# Least free memory of the windows that are shown; the default of `ebbtide windows`.
MIN_WINDOW_BYTES = 2**30
# The view, and looks for findings, take at most one part in this number of the time of
# one core.
_LOOK_SHARE = 50
_FINDINGS_SHARE = 100
_MIN_PERIOD_S = 1.0
_MIN_FINDINGS_PERIOD_S = 10.0
# Of a longer output only the end is shown.
_TAIL_BYTES = 20_000


@dataclass(frozen=True)
class SeenFinding:
    """A finding, and the newest iteration when it was first true.

    The iteration is None for a trace that was finished by then.
    """

    finding: Finding
    since: int | None


@dataclass(frozen=True)
class RecordingSnapshot:
    """One look at a recording."""

    path: Path  # The trace.
    state: State = "waiting"
    behind: bool = False  # Whether it has not been read to its end yet.
    trace: Trace | None = None  # Its last iterations; None while nothing was recorded.
    ranks: tuple[LiveRank, ...] = ()  # Figures of each rank.
    # What is true of the last iterations (of all, if the trace is finished); None
    # before the first look.
    findings: tuple[SeenFinding, ...] | None = None
    # Windows of the rank that was selected; None before the first look.
    windows: Windows | None = None


@dataclass(frozen=True)
class SelectedRank:
    """One rank of a snapshot, as far as the view is zoomed."""

    snapshot: RecordingSnapshot
    figures: LiveRank  # Figures of the rank.
    trace: Trace  # The last iterations.
    iterations: int  # How many iterations to show.

    @cached_property
    def range_ns(self) -> tuple[int, int] | None:
        """Start and end of these iterations; without iterations, of the trace."""
        return time_range(self.trace, self.figures.rank, self.iterations)


class SnapshotReader:
    """Reads snapshots, and after the first one findings and windows as often as is
    cheap."""

    def __init__(self, live: LiveTrace) -> None:
        self.period_s = 0.0
        self._live = live
        self._ranks: tuple[LiveRank, ...] = ()
        self._seen: dict[str, int | None] = {}
        self._findings: tuple[SeenFinding, ...] | None = None
        self._windows: Windows | None = None
        self._next_findings_s = 0.0
        # CPU time of this process at the end of the last snapshot.
        self._read_until_s = time.process_time()
        # The state of the recording and the rank that `_look` has looked at.
        self._looked_at: tuple[State, int] | None = None

    def read(self, rank: int) -> RecordingSnapshot | None:
        """Return a new snapshot; None if nothing has changed. Raises TraceError where
        the trace cannot be read."""
        # What the screen has taken since the last snapshot counts, too.
        drawn_s = time.process_time() - self._read_until_s
        looked = self.period_s > 0 and self._look(rank)
        begun_s = time.process_time()
        changed = self._live.poll()
        if changed:
            self._ranks = tuple(self._live.rank(number) for number in self._live.ranks)
        self._read_until_s = time.process_time()
        self.period_s = max(
            _MIN_PERIOD_S, _LOOK_SHARE * (self._read_until_s - begun_s + drawn_s)
        )
        if not changed and not looked:
            return None
        live = self._live
        return RecordingSnapshot(
            live.path,
            live.state,
            live.behind,
            live.trace,
            self._ranks,
            self._findings,
            self._windows,
        )

    def _look(self, rank: int) -> bool:
        """Look for findings and windows if it is time; return whether it was."""
        trace = self._live.finished or self._live.trace
        is_due = (
            self._live.state == "recording"
            and time.monotonic() >= self._next_findings_s
        )
        if trace is None or not (is_due or self._looked_at != (self._live.state, rank)):
            return False
        begun_s = time.thread_time()
        iterations = [
            figures.iteration
            for figures in self._ranks
            if figures.iteration is not None
        ]
        newest = (
            None if self._live.finished is not None else max(iterations, default=None)
        )
        if is_due or self._looked_at is None or self._looked_at[0] != self._live.state:
            findings = find(trace).findings
            self._seen = {
                finding.rule: self._seen.get(finding.rule, newest)
                for finding in findings
            }
            self._findings = tuple(
                SeenFinding(finding, self._seen[finding.rule]) for finding in findings
            )
        shown = [rank] if rank in trace.ranks else trace.ranks[:1]
        self._windows = find_windows(self._live.trace or trace, MIN_WINDOW_BYTES, shown)
        self._looked_at = self._live.state, rank
        pause_s = max(
            _MIN_FINDINGS_PERIOD_S, _FINDINGS_SHARE * (time.thread_time() - begun_s)
        )
        self._next_findings_s = time.monotonic() + pause_s
        return True


def tail(log: Path) -> str:
    """Return the end of a job's output."""
    try:
        with open(log, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError as error:
        return f"the output cannot be read: {error.strerror or error}"
    return text if size <= _TAIL_BYTES else text.partition("\n")[2]


def newest_recording(folder: Path) -> Path:
    """Return the trace of a folder whose recording runs and began last. Raises
    UserError where none runs."""
    began: list[tuple[int, Path]] = []
    for path in sorted(folder.glob(f"*/{META}")):
        try:
            meta = read_meta(path.parent)
        except TraceError:
            continue
        if meta.get("state") == "recording" and collector_runs(path.parent):
            began.append((int(meta.get("started_wall_ns") or 0), path.parent))
    if not began:
        raise UserError(
            "no recording runs in this folder: name a trace (ebbtide watch RUN.ebb), "
            "or begin one (ebbtide profile)"
        )
    return max(began)[1]
