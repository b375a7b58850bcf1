"""Keeps the last iterations of one recorded process, and counts those before them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ebbtide.phases import PHASES
from ebbtide.profiler.agent import spool as kinds
from ebbtide.profiler.recording.spools.records import (
    RECORD,
    Records,
    first_start_ns,
    is_header,
    is_valid,
    iteration_ends,
    stop_reason,
)
from ebbtide.profiler.trace.untrusted import open_regular

_SEQUENCED = (kinds.PHASE, kinds.GPU_TIMES, kinds.OP)
_EMPTY: Records = np.empty(0, RECORD)


def sequenced(records: Records) -> npt.NDArray[np.bool_]:
    """Return which records have the sequence number of a phase or an operation in
    `a`."""
    return np.isin(records["kind"], _SEQUENCED)


def outdated_memory(records: Records, time_ns: int) -> npt.NDArray[np.bool_]:
    """Return which samples of memory no moment after `time_ns` depends on.

    Each holds until the next one.
    """
    outdated: npt.NDArray[np.bool_] = (records["kind"] == kinds.MEMORY) & (
        records["x"] < time_ns
    )
    rows = np.flatnonzero(outdated)
    series = records[["code", "small", "a"]][rows]
    # The last of each series, which holds at `time_ns`: the first one from the end.
    _, first_from_end = np.unique(series[::-1], return_index=True)
    outdated[rows[len(rows) - 1 - first_from_end]] = False
    return outdated


class SpoolTail:
    """Reads one spool in pieces.

    A record that is not complete yet is left for the next time. `last_bytes`: how much
    of a longer file is read behind its header, at most; None: all of the file.
    """

    def __init__(self, path: Path, last_bytes: int | None = None) -> None:
        self.path = path
        self.header: Any = None  # Its first record; None until it was read.
        # False for a file that does not begin with the header of this version: nothing
        # in the file is read.
        self.is_readable = True
        self.behind = False  # Whether the file had more than the last call has read.
        self._offset = 0
        if last_bytes is not None and (size := path.stat().st_size) > last_bytes:
            self.read(RECORD.itemsize)
            self._offset = max(self._offset, size - size % RECORD.itemsize - last_bytes)

    def read(self, max_bytes: int = -1) -> Records:
        """Return the complete and valid records after those read so far (-1: all).

        There are none where it is gone.
        """
        self.behind = False
        if not self.is_readable:
            return _EMPTY
        try:
            with open_regular(self.path) as file:
                file.seek(self._offset)
                raw = file.read(max_bytes)
        except FileNotFoundError:
            return _EMPTY
        self.behind = len(raw) == max_bytes
        size = len(raw) - len(raw) % RECORD.itemsize
        records: Records = np.frombuffer(raw[:size], RECORD)
        self._offset += size
        if self.header is None and len(records):
            self.is_readable = is_header(records[0])
            if not self.is_readable:
                return _EMPTY
            self.header = records[0]
        return records[is_valid(records)]


# A process of a job with many operations per iteration keeps fewer iterations: 19 MB of
# records.
MAX_RECORDS = 400_000
# Phases whose device times are still missing make their iterations unfinished, up to
# this many iterations.
_MAX_PENDING_ITERATIONS = 4


@dataclass(frozen=True)
class PhaseCounts:
    """Time and number of a process's finished iterations since recording began."""

    iterations: int = 0
    # Time from the start of the first to the end of the last of them, by the host's
    # clock.
    iteration_ns: int = 0
    # Phase -> its time, summed over iterations: by the device's clock, where it was
    # recorded.
    phase_ns: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))
    # Phase -> the number of iterations that had it.
    phase_iterations: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(PHASES, 0)
    )

    def plus(self, records: Records, ends: dict[int, int]) -> PhaseCounts:
        """Add iterations.

        `ends` is the sequence number of the last phase of each, `records` contain all
        of them.
        """
        if not ends:
            return self
        lasts = np.maximum.accumulate(np.array([*ends.values()], np.int64))
        phases = records[(records["kind"] == kinds.PHASE) & (records["a"] <= lasts[-1])]
        lengths = _lengths_ns(records, phases)
        iteration = np.searchsorted(lasts, phases["a"], side="left")
        rows = {phase: phases["code"] == code for code, phase in enumerate(PHASES)}
        return PhaseCounts(
            self.iterations + len(ends),
            phase_ns={
                phase: ns + int(lengths[rows[phase]].sum())
                for phase, ns in self.phase_ns.items()
            },
            phase_iterations={
                phase: number + len(np.unique(iteration[rows[phase]]))
                for phase, number in self.phase_iterations.items()
            },
        )


class ProcessTail:
    """Follows the spool of one process. `last_record_ns`: time of its last record with
    one; None before."""

    def __init__(self, path: Path, iterations: int) -> None:
        self.spool = SpoolTail(path)
        self.last_record_ns: int | None = None
        self._keep = iterations
        self._records = _EMPTY
        self._dropped_sequence = -1
        # Counts of the iterations that are not kept any more.
        self.dropped = PhaseCounts()
        self._begin_ns: int | None = None
        self._counts: PhaseCounts | None = None

    @property
    def pid(self) -> int:
        return kinds.process_id(self.spool.path.name)

    @property
    def window_start_ns(self) -> int | None:
        """Start of the first iteration that is kept; None before the first phase."""
        return first_start_ns(self._records)

    @property
    def stop_reason(self) -> str | None:
        """One of `spool.STOP_REASONS`, or None while more may be recorded."""
        return stop_reason(self._records)

    def poll(self, max_bytes: int) -> int:
        """Read new records; return their number. `max_bytes`: bytes to read at most."""
        records = self.spool.read(max_bytes)
        if not len(records):
            return 0
        timed = records[
            (records["kind"] != kinds.HEADER) & (records["kind"] != kinds.GPU_TIMES)
        ]
        if len(timed):
            has_end = np.isin(timed["kind"], (kinds.PHASE, kinds.OP))
            latest = int(np.maximum(timed["x"], np.where(has_end, timed["y"], 0)).max())
            self.last_record_ns = max(latest, self.last_record_ns or 0)
        late = sequenced(records) & (
            records["a"].astype(np.int64) <= self._dropped_sequence
        )
        self._records = np.concatenate([self._records, records[~late]])
        self._counts = None
        if self._begin_ns is None:
            self._begin_ns = first_start_ns(self._records)
        self._trim()
        return len(records)

    def window(self) -> Records:
        """Return the header and the records of the last iterations. Phases after the
        last one whose device times are there, and iterations that they belong to, are
        left out."""
        records = self._records
        ready = self._ready_sequence()
        if ready is None:
            return records
        numbers = np.where(
            records["kind"] == kinds.ITERATION, records["b"], records["a"]
        ).astype(np.int64)
        later = (sequenced(records) | (records["kind"] == kinds.ITERATION)) & (
            numbers > ready
        )
        ready_records: Records = records[~later]
        return ready_records

    def counts(self) -> PhaseCounts:
        """Return the counts since the recording began. None of them decreases."""
        if self._counts is None:
            window = self.window()
            ends = iteration_ends(window)
            end_ns = _end_ns(window, ends)
            length_ns = (
                0
                if self._begin_ns is None or end_ns is None
                else end_ns - self._begin_ns
            )
            self._counts = replace(
                self.dropped.plus(window, ends), iteration_ns=length_ns
            )
        return self._counts

    def _ready_sequence(self) -> int | None:
        """Return the last sequence number with all device times up to it.

        Return None where none are recorded any more.
        """
        phases = self._records[self._records["kind"] == kinds.PHASE]["a"]
        timed = self._records[self._records["kind"] == kinds.GPU_TIMES]["a"]
        if not len(timed) or not len(phases) or self.stop_reason is not None:
            return None
        last = int(timed.max())
        ends = np.array(list(iteration_ends(self._records).values()), np.int64)
        return None if int((ends > last).sum()) > _MAX_PENDING_ITERATIONS else last

    def _trim(self) -> None:
        """Drop old iterations, half a window at a time.

        Of a job that finishes none, drop old samples.
        """
        slack = max(8, self._keep // 2)
        too_many = len(self._records) > MAX_RECORDS
        ends = (
            iteration_ends(self._records)
            if too_many or self._may_exceed(self._keep + 1 + slack)
            else {}
        )
        excess = len(ends) - (self._keep + 1)
        if too_many and len(ends) > 2:
            excess = max(excess, len(ends) // 2)
        if excess >= slack or (too_many and excess > 0):
            self._drop({number: ends[number] for number in list(ends)[:excess]})
        if len(self._records) > MAX_RECORDS:
            recent = (
                np.arange(len(self._records)) >= len(self._records) - MAX_RECORDS // 2
            )
            of_volume = np.isin(
                self._records["kind"], (kinds.MEMORY, kinds.OP, kinds.GPU_TIMES)
            )
            self._records = self._records[recent | ~of_volume]

    def _may_exceed(self, iterations: int) -> bool:
        """Return whether there may be more finished iterations, without looking for
        their ends."""
        kind = self._records["kind"]
        marked = int((kind == kinds.ITERATION).sum())
        return (marked or int((kind == kinds.PHASE).sum())) > iterations

    def _drop(self, ends: dict[int, int]) -> None:
        """Drop the first iterations. `ends`: iteration -> sequence number of its last
        phase."""
        records, last, sequence = self._records, max(ends), max(ends.values())
        end_ns = _end_ns(records, ends) or 0
        self.dropped = self.dropped.plus(records, ends)
        self._dropped_sequence = sequence
        kind = records["kind"]
        old = sequenced(records) & (records["a"] <= sequence)
        old |= (kind == kinds.ITERATION) & (records["a"] <= last)
        old |= kind == kinds.START
        old |= outdated_memory(records, end_ns)
        start = np.zeros(1, RECORD)
        start["kind"], start["a"], start["x"] = kinds.START, last + 1, end_ns
        kept = records[~old]
        self._records = np.concatenate([kept[:1], start, kept[1:]])


def _lengths_ns(
    records: Records, phases: Records
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the length of each phase, by the device's clock where each has device
    times, else by the host's."""
    times = records[records["kind"] == kinds.GPU_TIMES]
    order = np.argsort(times["a"], kind="stable")
    times = times[order]
    index = np.searchsorted(times["a"], phases["a"], side="right") - 1
    if (
        len(times)
        and len(phases)
        and (times["a"][np.maximum(index, 0)] == phases["a"]).all()
    ):
        phases = times[index]
    lengths: np.ndarray[tuple[int], np.dtype[np.int64]] = phases["y"] - phases["x"]
    return lengths


def _end_ns(records: Records, ends: dict[int, int]) -> int | None:
    """Return when the last of some iterations ended, by the host's clock."""
    if not ends:
        return None
    phases = records[
        (records["kind"] == kinds.PHASE) & (records["a"] <= max(ends.values()))
    ]
    return int(phases["y"].max()) if len(phases) else None
