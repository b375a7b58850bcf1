"""Follows the processes of a recording in their spools, and never touches the processes themselves."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ebbtide.profiler.agent import spool as kinds
from ebbtide.profiler.agent.spool import process_id
from ebbtide.profiler.processes import process_runs
from ebbtide.profiler.trace.spool_records import RECORD, Records

# The end of a long spool, from where it is read first: some thousand iterations.
_FIRST_BYTES = 100_000 * RECORD.itemsize
# Iterations that the length of an iteration is the mean of.
_RECENT = 20


class SliceMark(NamedTuple):
    """A record of a process about a request. kind: one of `spool.DETAIL_MARKS`."""

    kind: str
    iteration: int


class ProcessProgress:
    """One process of a recording, as far as its spool is written.

    Attributes:
        rank: Its rank.
        opened_ns: When it began to record.
        iteration: The last iteration that it has finished; None before the first.
        ended_ns: The end of that iteration.
        stopped: Whether nothing more will be recorded.
        marks: The marks of each request, by its number.
    """

    def __init__(self, path: Path) -> None:
        self.pid = process_id(path.name)
        self.rank = 0
        self.opened_ns = self.ended_ns = 0
        self.iteration: int | None = None
        self.stopped = False
        self.marks: dict[int, list[SliceMark]] = {}
        self._path = path
        self._offset = 0
        self._ends: dict[int, int] = {}
        self._read_header()
        self.update()

    def _read_header(self) -> None:
        with self._path.open("rb") as file:
            header = np.frombuffer(file.read(RECORD.itemsize).ljust(RECORD.itemsize, b"\0"), RECORD)[0]
            size = os.fstat(file.fileno()).st_size
        self.rank, self.opened_ns = int(header["b"]), int(header["x"])
        whole = max(RECORD.itemsize, size - _FIRST_BYTES)
        self._offset = whole - whole % RECORD.itemsize

    @property
    def runs(self) -> bool:
        """Whether the process runs and records."""
        return not self.stopped and process_runs(self.pid)

    @property
    def iteration_ns(self) -> int:
        """Mean length of the last iterations, ns; of a first one since the recording began."""
        ends = list(self._ends.values())
        if len(ends) < 2:
            return max(self.ended_ns - self.opened_ns, 1)
        return max((ends[-1] - ends[0]) // (len(ends) - 1), 1)

    def update(self) -> None:
        """Read what was written since the last time."""
        records = self._new_records()
        for record in records[records["kind"] == kinds.ITERATION]:
            self.iteration, self.ended_ns = int(record["a"]), int(record["x"])
            self._ends[self.iteration] = self.ended_ns
        for iteration in list(self._ends)[:-_RECENT]:
            del self._ends[iteration]
        marks = records[records["kind"] == kinds.DETAILS]
        for record in marks[marks["code"] < len(kinds.DETAIL_MARKS)]:
            mark = SliceMark(kinds.DETAIL_MARKS[record["code"]], int(record["a"]))
            self.marks.setdefault(int(record["w"]), []).append(mark)
        self.stopped = self.stopped or bool((records["kind"] == kinds.STOPPED).any())

    def _new_records(self) -> Records:
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        data = data[: len(data) - len(data) % RECORD.itemsize]
        self._offset += len(data)
        return np.frombuffer(data, RECORD)

    def mark(self, number: int, kind: str) -> int | None:
        """Return the iteration of a mark of a request; None where there is no such mark."""
        return next((mark.iteration for mark in self.marks.get(number, ()) if mark.kind == kind), None)


def training_processes(spools: Path) -> list[ProcessProgress]:
    """Return the running processes of a recording that have finished an iteration, by rank.

    Raises:
        OSError: A spool was removed meanwhile: the recording has ended.
    """
    processes = [process for process in _newest_of_each(spools) if process.iteration is not None and process.runs]
    return sorted(processes, key=lambda process: (process.rank, process.pid))


def _newest_of_each(spools: Path) -> Iterator[ProcessProgress]:
    """Yield the newest spool of each process: one that executes another program begins a new spool."""
    newest: dict[int, ProcessProgress] = {}
    for path in spools.glob("agent-*.spool"):
        process = ProcessProgress(path)
        if process.pid not in newest or newest[process.pid].opened_ns < process.opened_ns:
            newest[process.pid] = process
    yield from newest.values()
