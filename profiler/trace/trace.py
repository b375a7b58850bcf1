"""The trace: typed metadata, and tables as pandas frames or arrays."""

from __future__ import annotations

import shlex
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from ebbtide import seams
from ebbtide.errors import TraceError
from ebbtide.profiler.trace.columns import Columns
from ebbtide.profiler.trace.metadata import RankInfo, TraceMeta, parse_meta
from ebbtide.profiler.trace.untrusted import files_of
from ebbtide.units import counted

if TYPE_CHECKING:
    import pandas as pd

# Returns a table (rank, table).
Load = Callable[[int, str], "Columns | pd.DataFrame"]
# Returns the different values of a text column (rank, table, column) without loading
# the table.
LoadLabels = Callable[[int, str, str], list[str]]
# The tables that were used last are kept in memory, up to this size: all of a usual
# trace, some ranks of a large one.
_MAX_TABLE_BYTES = 1 << 28
# Tables with figures over time, and their columns of first and last times.
_SPANS = {
    "phases": ("start_ns", "end_ns"),
    "memory": ("t_ns", "t_ns"),
    "link": ("t_ns", "t_ns"),
    "gpu": ("t_ns", "t_ns"),
    "transfers": ("start_ns", "end_ns"),
}
# Tables of what a recording may have, a column of text of each, and the name for
# people.
_CONTENTS = {
    "phases": ("phase", "phases"),
    "memory": ("pool", "memory"),
    "link": ("source", "counters of the link"),
    "transfers": ("direction", "copies"),
    "kernels": ("kind", "kernels"),
    "allocations": ("device", "allocations"),
    "ops": ("resource", "sub-steps"),
    "gpu": ("device", "state of the GPU"),
}


class Trace:
    """A trace: its metadata, and the tables of each rank.

    Tables are read when they are used.

    Tables stay in memory up to 256 MiB, those used last; others are read again. Several
    threads may read.

    Times are ns on one monotonic clock, sizes bytes, rates bytes/s.

    Attributes:
        path: The folder of the trace.
        raw_meta: The object of meta.json, with keys that the format does not specify.
            Do not change it.
    """

    def __init__(
        self,
        path: Path,
        raw_meta: dict[str, Any],
        load: Load,
        load_labels: LoadLabels | None = None,
    ) -> None:
        self.path = path
        self.raw_meta = raw_meta
        self._load = load
        self._load_labels = load_labels
        self._tables: OrderedDict[tuple[int, str], Columns] = OrderedDict()
        self._labels: dict[tuple[int, str, str], list[str]] = {}
        # Of the tables that were added since the limit was last checked.
        self._new_bytes = 0
        # Several threads may compute figures of different ranks.
        self._lock = Lock()

    def __repr__(self) -> str:
        meta = self.meta
        return (
            f"Trace({str(self.path)!r}, source={meta.source!r}, state={meta.state!r}, "
            f"ranks={self.ranks})"
        )

    @cached_property
    def meta(self) -> TraceMeta:
        """The typed metadata.

        Its keys are the keys of meta.json, which docs/trace-format.md specifies.
        """
        return parse_meta(self.raw_meta, self.path)

    @cached_property
    def _entries(self) -> dict[int, RankInfo]:
        return {entry.rank: entry for entry in reversed(self.meta.ranks)}

    @property
    def ranks(self) -> list[int]:
        """The numbers of the recorded ranks."""
        return [entry.rank for entry in self.meta.ranks]

    @property
    def notes(self) -> list[str]:
        """Lines for people: what is missing or unusual."""
        return list(self.meta.notes)

    @property
    def name(self) -> str:
        """The name of the folder without `.ebb`."""
        return self.path.name.removesuffix(".ebb")

    @cached_property
    def stored_bytes(self) -> int:
        """The size of the files of the ranks; 0 of a trace in memory."""
        return files_of(self.path, self.ranks).nbytes()

    def rank(self, rank: int) -> RankInfo:
        """Return the metadata of one rank. Raises TraceError for a rank that was not
        recorded."""
        if rank in self._entries:
            return self._entries[rank]
        recorded = ", ".join(map(str, self.ranks)) or "none"
        raise TraceError(f"{self.path} has no rank {rank}: it has {recorded}")

    def of_ranks(self, ranks: Sequence[int]) -> Trace:
        """Return the trace of some ranks alone. Raises TraceError for a rank that was
        not recorded."""
        for rank in ranks:
            self.rank(rank)
        entries = [entry for entry in self.raw_meta["ranks"] if entry["rank"] in ranks]
        return Trace(
            self.path, {**self.raw_meta, "ranks": entries}, self.columns, self.labels
        )

    def span_ns(self, rank: int | None = None) -> tuple[int, int] | None:
        """Return the first and the last time of anything recorded, in ns, of one rank,
        or of all if it is None; None if nothing was recorded."""
        times = []
        for number in self.ranks if rank is None else [rank]:
            for name, (start, end) in _SPANS.items():
                table = self.columns(number, name)
                if len(table):
                    window = table.ints("window_ns") if name == "link" else 0
                    times += [
                        int((table.ints(start) - window).min()),
                        int(table.ints(end).max()),
                    ]
        return (min(times), max(times)) if times else None

    def table(self, rank: int, name: str) -> pd.DataFrame:
        """Return a table of one rank, sorted by time, with the columns of
        docs/trace-format.md. Do not change it."""
        return self.columns(rank, name).frame

    def columns(self, rank: int, name: str) -> Columns:
        """Return a table of one rank as arrays, without pandas."""
        self.rank(rank)
        key = rank, name
        with self._lock:
            if key in self._tables:
                self._tables.move_to_end(key)
                return self._tables[key]
        loaded = self._load(rank, name)
        table = loaded if isinstance(loaded, Columns) else Columns(name, loaded)
        with self._lock:
            table = self._tables.setdefault(key, table)
            self._new_bytes += table.nbytes
            # Adding up all tables for each new one would take time that grows with the
            # square of the ranks.
            if self._new_bytes > _MAX_TABLE_BYTES / 8:
                self._new_bytes = 0
                while (
                    sum(kept.nbytes for kept in self._tables.values())
                    > _MAX_TABLE_BYTES
                    and len(self._tables) > 1
                ):
                    self._tables.popitem(last=False)
                # Arrow keeps the memory of what is dropped for later tables.
                pa.default_memory_pool().release_unused()
        return table

    def labels(self, rank: int, name: str, column: str) -> list[str]:
        """Return the different values of a rank's text column, in order of appearance.

        The column is of a table of one rank.
        """
        self.rank(rank)
        if self._load_labels is None or (rank, name) in self._tables:
            return self.columns(rank, name).labels(column)
        key = rank, name, column
        if key not in self._labels:
            self._labels[key] = self._load_labels(rank, name, column)
        return self._labels[key]

    def phases(self, rank: int) -> pd.DataFrame:
        """Return the table `phases` of one rank."""
        return self.table(rank, "phases")

    def memory(self, rank: int) -> pd.DataFrame:
        """Return the table `memory` of one rank."""
        return self.table(rank, "memory")

    def link(self, rank: int) -> pd.DataFrame:
        """Return the table `link` of one rank."""
        return self.table(rank, "link")

    def transfers(self, rank: int) -> pd.DataFrame:
        """Return the table `transfers` of one rank."""
        return self.table(rank, "transfers")

    def ops(self, rank: int) -> pd.DataFrame:
        """Return the table `ops` of one rank."""
        return self.table(rank, "ops")

    def gpu(self, rank: int) -> pd.DataFrame:
        """Return the table `gpu` of one rank; empty in traces of earlier versions."""
        return self.table(rank, "gpu")

    def kernels(self, rank: int) -> pd.DataFrame:
        """Return the table `kernels` of one rank; empty where kernels were not
        recorded."""
        return self.table(rank, "kernels")

    def calls(self, rank: int) -> pd.DataFrame:
        """Return the table `calls` of one rank; empty where calls were not recorded."""
        return self.table(rank, "calls")

    def iteration_marks(self, rank: int) -> pd.DataFrame:
        """Return the table `iteration_marks` of one rank; empty where the source does
        not mark iterations."""
        return self.table(rank, "iteration_marks")

    def annotations(self, rank: int) -> pd.DataFrame:
        """Return the table `annotations` of a rank; empty where none were recorded."""
        return self.table(rank, "annotations")

    def marks(self, rank: int) -> pd.DataFrame:
        """Return the table `marks` of a rank; empty where `ebbtide.step` named none."""
        return self.table(rank, "marks")

    def allocations(self, rank: int) -> pd.DataFrame:
        """Return the table `allocations` of one rank; empty where allocations were not
        recorded one by one."""
        return self.table(rank, "allocations")


def closing_lines(trace: Trace) -> list[str]:
    """Return the last lines of a command that writes a trace: the trace's path, its
    contents, and the command to run next."""
    return [
        f"trace: {shlex.quote(str(trace.path))}, "
        f"{counted(_iterations(trace), 'iteration')} on "
        f"{counted(len(trace.ranks), 'rank')}",
        "recorded: "
        f"{', '.join(_CONTENTS[table][1] for table in _recorded_tables(trace)) or 'nothing'}",
        next_line(trace, "summary {}"),
    ]


def next_line(trace: Trace, follow_up: str) -> str:
    """Return the line with the next command to run, `follow_up` with {} for the trace.

    Where the trace has nothing of training or of a GPU, which no command can explain,
    it is the command that records some."""
    if (
        _iterations(trace)
        or {*_recorded_tables(trace)} - {"phases", "memory"}
        or _devices(trace) - {"cpu"}
    ):
        return f"next: ebbtide {follow_up.format(shlex.quote(str(trace.path)))}"
    plug = seams.plugs("sources").get(trace.meta.source or "")
    command = "profile" if plug is None else plug.load()
    return f"next: ebbtide {command} -- CMD (a job that trains: no iteration was seen)"


def _iterations(trace: Trace) -> int:
    """Return the number of iterations of the first rank."""
    for rank in trace.ranks[:1]:
        tables = (trace.columns(rank, name) for name in ("phases", "iteration_marks"))
        numbers = (
            {*table.ints("iteration")[table.recorded("iteration")].tolist()}
            for table in tables
        )
        return len(next(filter(None, numbers), ()))
    return 0


def _devices(trace: Trace) -> set[str]:
    """Return the devices whose memory the first rank has."""
    return {
        device
        for rank in trace.ranks[:1]
        for device in trace.labels(rank, "memory", "device")
    }


def _recorded_tables(trace: Trace) -> list[str]:
    """Return the tables of `_CONTENTS` in which the first rank has rows."""
    return [
        table
        for table, (column, _) in _CONTENTS.items()
        if any(trace.labels(r, table, column) for r in trace.ranks[:1])
    ]
