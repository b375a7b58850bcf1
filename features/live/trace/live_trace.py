"""Follows a trace while it is recorded, until it is finished, and opens a finished one
in the same manner."""

import socket
import time
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from ebbtide.analysis.metrics.iterations import intervals, steady_iterations
from ebbtide.analysis.metrics.link_throughput import DIRECTIONS
from ebbtide.errors import TraceError
from ebbtide.features.live.recording.recording_tail import RecordingTail
from ebbtide.features.live.trace.rank_figures import (
    LiveRank,
    RankState,
    RankTotals,
    rank_figures,
    rank_totals,
    totals_of_trace,
)
from ebbtide.profiler.recording.lock import collector_runs
from ebbtide.profiler.recording.spools.tables import select_rows
from ebbtide.profiler.sampler.processes import process_runs
from ebbtide.profiler.trace import Trace, open_trace
from ebbtide.profiler.trace.files import META, read_meta
from ebbtide.profiler.trace.metadata import parse_meta
from ebbtide.profiler.trace.schema import SORT
from ebbtide.urls import Url, location

# waiting: nothing was recorded yet. recording: a process records. silent: none has
# recorded anything for long. finishing: all processes have ended, and the trace is
# being written. cut off: they have, and nobody finishes it. complete: the trace is
# finished. gone: the trace was removed, since nothing was recorded.
State = Literal[
    "waiting", "recording", "silent", "finishing", "cut off", "complete", "gone"
]

# A process that runs is silent if it has recorded nothing for this long, and for this
# many of its longest iterations.
_SILENT_S = 10.0
_SILENT_ITERATIONS = 5.0
# Samples of the link have a window, and samples of the GPU's state hold, for this long
# at most.
_MARGIN_NS = 1_000_000_000
_SAMPLED = ("link", "gpu")


class LiveTrace:
    """The last iterations of a trace, whether it is being recorded or is finished. Each
    `poll` reads what a recording has gained; memory is bounded by the number of
    iterations. Nothing is locked or written, and the job is not touched. When the
    recording has been finished, the tables are read instead."""

    def __init__(self, path: str | Path, iterations: int = 50) -> None:
        self.path = location(path)  # The trace.
        if isinstance(self.path, Url):
            raise TraceError(
                f"{path} is not on this machine: ebbtide summary reads it so far"
            )
        self.state: State = "waiting"  # See `State`.
        # The last iterations, and one before them as warm-up; None until a process has
        # begun to record.
        self.trace: Trace | None = None
        self._iterations = iterations
        self._tail: RecordingTail | None = None
        # The whole trace; None until it is finished.
        self.finished: Trace | None = None
        # Modification time and inode of meta.json, and when its recording began.
        self._stamp: tuple[int, int] | None = None
        self._started_ns: Any = None
        self._totals: dict[int, RankTotals] = {}

    @property
    def behind(self) -> bool:
        """Whether a long recording has not been read to its end yet.

        Figures then describe an earlier time.
        """
        return self._tail is not None and self._tail.behind

    @property
    def ranks(self) -> list[int]:
        """The ranks that have begun to record."""
        return self.trace.ranks if self.trace is not None else []

    def poll(self) -> bool:
        """Read what was recorded since the last call.

        Return whether anything has changed. Raises TraceError where the path is no
        trace, is damaged, or has a newer schema.
        """
        before = self.state
        if self._meta_changed():
            self._open()
        if self._tail is not None:
            # The tables may be there while the spools still are, but not the other way
            # round.
            changed = self._tail.poll()
            if changed or self.trace is None:
                window = self._tail.trace()
                self.trace = (
                    None
                    if window is None
                    else last_iterations(window, self._iterations)
                )
            self._totals.clear()
            self.state = self._recording_state(self._tail)
            return changed or self.state != before
        return self.state != before

    def rank(self, rank: int) -> LiveRank:
        """Measure one rank. Raises TraceError for a rank that has not begun to
        record."""
        if self.trace is None:
            raise TraceError(f"{self.path}: nothing was recorded yet")
        return rank_figures(self.trace, rank, self._rank_state(rank))

    def totals(self, rank: int) -> RankTotals:
        """Return the sums of a rank so far, which never decrease. Raises TraceError for
        one that has not begun."""
        if rank not in self.ranks:
            raise TraceError(f"{self.path} has no rank {rank}")
        if rank not in self._totals:
            if self._tail is not None:
                moved = self._tail.link_bytes(rank) or {}
                self._totals[rank] = rank_totals(
                    self._tail.counts(rank), {d: moved.get(d) for d in DIRECTIONS}
                )
            elif self.finished is not None:
                self._totals[rank] = totals_of_trace(self.finished, rank)
        return self._totals[rank]

    def _meta_changed(self) -> bool:
        try:
            status = (self.path / META).stat()
        except FileNotFoundError:
            if self._stamp is None and (
                not self.path.exists() or self._is_new_recording()
            ):
                return False
            if self._stamp is None:
                raise TraceError(
                    f"{self.path} is not a trace: it has no readable {META}"
                ) from None
            self.state, self._tail, self._stamp = "gone", None, None
            return False
        except OSError as error:
            raise TraceError(
                f"{self.path} is not a trace: {error.strerror or error}"
            ) from None
        stamp = status.st_mtime_ns, status.st_ino
        changed, self._stamp = stamp != self._stamp, stamp
        return changed

    def _is_new_recording(self) -> bool:
        """Return whether a folder without meta.json may be a new recording's.

        The recording begins this moment.
        """
        try:
            return self.path.is_dir() and {
                entry.name for entry in self.path.iterdir()
            } <= {"spool", f"{META}.new"}
        except OSError:
            return False

    def _open(self) -> None:
        """Read meta.json, and follow the spools or open the tables, as it says."""
        meta = read_meta(self.path)
        if parse_meta(meta, self.path).state == "recording":
            started_ns = meta.get("started_ns")
            if self._tail is None or started_ns != self._started_ns:
                self._tail = RecordingTail(self.path, meta, self._iterations)
                self.trace, self.finished = None, None
            self._started_ns = started_ns
            return
        self._tail = None
        self.finished = open_trace(self.path)
        self.trace = last_iterations(self.finished, self._iterations)
        self._totals.clear()
        self.state = "complete"

    def _recording_state(self, tail: RecordingTail) -> State:
        if self.trace is None and not any(
            process.last_record_ns for process in tail.processes.values()
        ):
            return "waiting" if self._collector_may_run(tail) else "cut off"
        states = {self._rank_state(rank) for rank in self.ranks}
        for state in ("recording", "silent"):
            if state in states:
                return state
        return "finishing" if self._collector_may_run(tail) else "cut off"

    def _rank_state(self, rank: int) -> RankState:
        if self._tail is None:
            return "complete"
        process = self._tail.ranks[rank]
        if process.stop_reason is not None:
            return "stopped"
        if self._on_this_host(self._tail) and not process_runs(process.pid):
            return "ended"
        if process.last_record_ns is None:
            return "recording"
        offset_ns = self._tail.meta.get("clock", {}).get("wall_offset_ns") or 0
        silence_s = (time.time_ns() - offset_ns - process.last_record_ns) / 1e9
        longest_s = 0.0
        if self.trace is not None:
            times = intervals(self.trace, rank, device_times=False)
            longest_s = float((times.ends - times.starts).max(initial=0)) / 1e9
        return (
            "silent"
            if silence_s > max(_SILENT_S, longest_s * _SILENT_ITERATIONS)
            else "recording"
        )

    def _collector_may_run(self, tail: RecordingTail) -> bool:
        return not self._on_this_host(tail) or collector_runs(self.path)

    @staticmethod
    def _on_this_host(tail: RecordingTail) -> bool:
        return bool(tail.meta["host"].get("name") == socket.gethostname())


def last_iterations(trace: Trace, count: int) -> Trace:
    """Return the last iterations of a trace, and one before them as warm-up.

    The start of the warm-up is known by the host's clock alone. Return the same trace
    where it has not as many iterations, or none.
    """
    spans = {
        rank: intervals(trace, rank, device_times=False).spans for rank in trace.ranks
    }
    newest = max(
        (int(rows["iteration"].max()) for rows in spans.values() if len(rows)),
        default=-1,
    )
    first = newest - count
    oldest = min(
        (int(rows["iteration"].min()) for rows in spans.values() if len(rows)),
        default=first,
    )
    if oldest >= first:
        return trace
    # A rank that has not got so far begins where its last iteration ended.
    starts = {rank: _start_ns(rows, first) for rank, rows in spans.items()}
    entries = [
        {**entry, "first_iteration_start_ns": start_ns}
        if (start_ns := starts[entry["rank"]]) is not None
        else entry
        for entry in trace.raw_meta["ranks"]
    ]
    _, warmup = steady_iterations(trace)
    dropped = len(
        {int(i) for rows in spans.values() for i in rows["iteration"] if i < first}
    )
    meta = {
        **trace.raw_meta,
        "ranks": entries,
        "warmup_iterations": max(1, warmup - dropped),
    }
    return Trace(
        trace.path,
        meta,
        lambda rank, table: _cut(trace.table(rank, table), table, first, starts[rank]),
    )


def _start_ns(spans: pd.DataFrame, first: int) -> int | None:
    later = spans[spans["iteration"] >= first]
    if len(later):
        return int(later["start_ns"].iloc[0])
    return int(spans["end_ns"].iloc[-1]) if len(spans) else None


def _cut(
    rows: pd.DataFrame, table: str, first: int, start_ns: int | None
) -> pd.DataFrame:
    """Return the rows of a table of the iterations from `first` on, or of times from
    `start_ns` on."""
    if start_ns is None or rows.empty:
        return rows
    if table in ("phases", "ops", "iteration_marks"):
        later = rows["iteration"].ge(first) | (
            rows["iteration"].isna() & (rows[SORT[table]] >= start_ns)
        )
        later = later.fillna(False).astype(bool)
        return (
            select_rows(rows, later)
            if table == "ops"
            else rows[later].reset_index(drop=True)
        )
    if table == "memory":
        return _memory_from(rows, start_ns)
    if table in _SAMPLED:
        return rows[rows["t_ns"] >= start_ns - _MARGIN_NS].reset_index(drop=True)
    ends = rows["end_ns"].astype("Int64").fillna(np.iinfo(np.int64).max)
    return rows[(ends >= start_ns).to_numpy(bool)].reset_index(drop=True)


def _memory_from(rows: pd.DataFrame, start_ns: int) -> pd.DataFrame:
    """Return the samples of memory from a time on.

    The last one of each pool before it is included.
    """
    begin = int(np.searchsorted(rows["t_ns"].to_numpy(), start_ns))
    last = ~rows.iloc[:begin].duplicated(["device", "pool"], keep="last")
    return pd.concat([rows.iloc[:begin][last], rows.iloc[begin:]], ignore_index=True)
