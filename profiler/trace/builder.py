"""Builds a trace from rows; importers, simulated traces and tests use it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from ebbtide.phases import PHASES
from ebbtide.profiler.trace.files import new_trace, open_trace, write_meta, write_table
from ebbtide.profiler.trace.metadata import parse_meta
from ebbtide.profiler.trace.schema import SORT, TABLES, TraceColumn, arrow_schema
from ebbtide.profiler.trace.trace import Trace
from ebbtide.profiler.trace.untrusted import flaws
from ebbtide.units import counted

if TYPE_CHECKING:
    import pandas as pd

# Rows of a frame of a large table.
_FRAME_ROWS = 1 << 18


class RankBuilder:
    """Collects the rows of one rank. Times are ns, sizes bytes.

    Attributes:
        meta: The rank's entry of meta.json; callers may change it.
    """

    def __init__(self, meta: dict[str, Any]) -> None:
        self.meta = meta
        self._rows: dict[str, list[dict[str, Any]]] = {table: [] for table in TABLES}
        self._columns: dict[str, list[dict[str, Any]]] = {table: [] for table in TABLES}
        self._typical: int | None = None

    def add(self, table: str, **row: Any) -> RankBuilder:
        """Add a row and return the builder. Only nullable columns may be left out."""
        self._rows[table].append(row)
        return self

    def extend(self, table: str, **columns: Any) -> RankBuilder:
        """Add many rows as columns and return the builder. A column is an array, or one
        value for all rows."""
        self._columns[table].append(columns)
        return self

    def parts(self) -> Iterator[dict[str, Any]]:
        """Yield the rows so far as they were added: single rows, and columns of rows.
        Callers may change values."""
        for table in TABLES:
            yield from self._rows[table]
            yield from self._columns[table]

    def frame(self, table: str) -> pd.DataFrame:
        """Return the rows so far. Raises ValueError for rows that do not fit the
        table."""
        return _joined(table, self._columns[table], self._rows[table])

    def tables_of(self, table: str) -> Iterator[pa.Table]:
        """Yield the rows so far in the order of time, without pandas.

        A large table gives several: one takes too much memory. Raises ValueError as
        `frame`.
        """
        parts, rows = self._columns[table], self._rows[table]
        times = [np.asarray(part[SORT[table]]) for part in parts]
        longest = max(times, key=np.size, default=np.empty(0))
        if (
            longest.size <= _FRAME_ROWS
            or rows
            or not all((np.diff(own) >= 0).all() for own in times)
        ):
            yield arrow_rows(table, [*parts, *_as_columns(table, rows)])
            return
        limits = longest[_FRAME_ROWS::_FRAME_ROWS]
        cuts = [pairwise([0, *np.searchsorted(own, limits), len(own)]) for own in times]
        for bounds in zip(*cuts, strict=True):
            pieces = zip(parts, bounds, strict=True)
            yield arrow_rows(table, [_cut(part, *ends) for part, ends in pieces])

    def sound_tables_of(
        self, table: str, left_out: Mapping[str, list[str]]
    ) -> Iterator[pa.Table]:
        """Yield `tables_of` without the rows that readers would refuse. The reason for
        each is added to `left_out`, by table."""
        for rows in self.tables_of(table):

            def numbers(name: str, rows: pa.Table = rows) -> tuple[Any, Any]:
                column = rows.column(name)
                values = column.fill_null(0).to_numpy()
                return values.astype(np.int64), column.is_valid().to_numpy()

            refused = np.zeros(len(rows), bool)
            for reason, refused_rows in flaws(table, numbers, self._typical_ns):
                new = refused_rows & ~refused
                left_out[table].extend([reason] * int(new.sum()))
                refused |= refused_rows
            yield rows.filter(pa.array(~refused)) if refused.any() else rows

    @property
    def _typical_ns(self) -> int:
        """The median of all times."""
        if self._typical is None:
            times = [
                np.asarray(part[SORT[table]], np.int64).ravel()
                for table in TABLES
                for part in (*self._columns[table], *self._rows[table])
            ]
            every = np.concatenate([np.empty(0, np.int64), *times])
            self._typical = int(np.median(every)) if len(every) else 0
        return self._typical

    def phase(
        self,
        phase: str,
        start_ns: int,
        end_ns: int,
        iteration: int | None = None,
        micro_step: int = 0,
        gpu_start_ns: int | None = None,
        gpu_end_ns: int | None = None,
    ) -> RankBuilder:
        """Add a phase and return the builder.

        `gpu_start_ns` and `gpu_end_ns` are the same two points on the device.
        """
        if phase not in PHASES:
            raise ValueError(f"{phase!r} is not a phase: {', '.join(PHASES)}")
        if end_ns < start_ns:
            raise ValueError(f"a {phase} ends {start_ns - end_ns} ns before its start")
        times = {
            "start_ns": start_ns,
            "end_ns": end_ns,
            "gpu_start_ns": gpu_start_ns,
            "gpu_end_ns": gpu_end_ns,
        }
        return self.add(
            "phases", phase=phase, iteration=iteration, micro_step=micro_step, **times
        )

    def memory(
        self, t_ns: int, size: int, pool: str = "device", device: str = "cuda:0"
    ) -> RankBuilder:
        """Add the bytes of a pool from a time on, and return the builder."""
        return self.add("memory", t_ns=t_ns, device=device, pool=pool, bytes=size)

    def link(
        self,
        t_ns: int,
        window_ns: int,
        source: str,
        device: str = "cuda:0",
        **rates: Any,
    ) -> RankBuilder:
        """Add a sample of a link's counters, and return the builder.

        The sample covers the window that ends at `t_ns`.

        `source`: `nvml-counters`, `gpm` or `nvml-throughput`. `rates`: h2d_bytes_per_s,
        d2h_bytes_per_s, generation and width, where they were recorded."""
        return self.add(
            "link",
            t_ns=t_ns,
            device=device,
            source=source,
            window_ns=window_ns,
            **rates,
        )

    def gpu(self, t_ns: int, device: str = "cuda:0", **values: Any) -> RankBuilder:
        """Add a sample of a GPU's state, and return the builder.

        Its values are columns of the table `gpu`.
        """
        return self.add("gpu", t_ns=t_ns, device=device, **values)

    def kernel(
        self,
        start_ns: int,
        end_ns: int,
        kind: str = "compute",
        name: str = "kernel",
        device: str = "cuda:0",
        launch_ns: int | None = None,
        stream: int | None = None,
        group: str | None = None,
        operator: str | None = None,
    ) -> RankBuilder:
        """Add work on a GPU, in device time, and return the builder.

        `kind`: `compute`, `communication`, `copy` (within or between GPUs) or `memset`.
        None where not recorded: the call that launched it, the stream, the process
        group of a collective, the operator."""
        row = {
            "start_ns": start_ns,
            "end_ns": end_ns,
            "kind": kind,
            "name": name,
            "device": device,
        }
        return self.add(
            "kernels",
            **row,
            launch_ns=launch_ns,
            stream=stream,
            group=group,
            operator=operator,
        )

    def transfer(
        self,
        direction: str,
        start_ns: int,
        end_ns: int,
        size: int | None,
        device: str = "cuda:0",
        **columns: Any,
    ) -> RankBuilder:
        """Add a copy between host and device, and return the builder.

        Times are the device's; the rank then counts as recording transfers.

        `direction`: `h2d` or `d2h`. `size`: None where not recorded. `columns`:
        host_memory ("pinned", "pageable"), stream, launch_ns and name, where they were
        recorded."""
        self.meta["transfers_recorded"] = True
        row = {
            "start_ns": start_ns,
            "end_ns": end_ns,
            "device": device,
            "direction": direction,
            "bytes": size,
        }
        return self.add("transfers", **{"name": direction, **row, **columns})


class TraceBuilder:
    """Builds a trace in memory (`build`) or on disk (`write`).

    Args:
        source: "recorded", "imported", "simulated" or "predicted".
        meta: Further keys of meta.json.

    Attributes:
        meta: The object of meta.json without its ranks; callers may change it.
    """

    def __init__(self, source: str = "imported", **meta: Any) -> None:
        self.meta: dict[str, Any] = {
            "state": "complete",
            "source": source,
            "notes": [],
            **meta,
        }
        self._ranks: dict[int, RankBuilder] = {}

    def rank(self, rank: int = 0, **meta: Any) -> RankBuilder:
        """Return the builder of one rank.

        meta: `devices` and further keys of its entry, which replace earlier ones.
        """
        if rank not in self._ranks:
            self._ranks[rank] = RankBuilder(
                {"rank": rank, "devices": [], "transfers_recorded": False}
            )
        self._ranks[rank].meta.update(meta)
        return self._ranks[rank]

    @property
    def ranks(self) -> dict[int, RankBuilder]:
        """The builders by the number of the rank."""
        return self._ranks

    def note(self, line: str) -> None:
        """Add a note for people: what is missing or unusual."""
        if line not in self.meta["notes"]:
            self.meta["notes"].append(line)

    def build(self, path: str | Path = "built.ebb") -> Trace:
        """Return the trace in memory. Raises ValueError for rows that do not fit;
        `path` is only used in messages."""
        frames = {
            (n, table): builder.frame(table)
            for n, builder in self._ranks.items()
            for table in TABLES
        }
        return Trace(
            Path(path), self._raw_meta(), lambda rank, table: frames[rank, table]
        )

    def _raw_meta(self) -> dict[str, Any]:
        return {
            **self.meta,
            "ranks": [self._ranks[rank].meta for rank in sorted(self._ranks)],
        }

    def write(self, path: str | Path, force: bool = False) -> Trace:
        """Write the trace and return it. Raises TraceError where `path` exists or
        cannot be written, and for metadata that does not fit the format."""
        path, meta = Path(path), self._raw_meta()
        parse_meta(meta, path)
        left_out: defaultdict[str, list[str]] = defaultdict(list)
        with new_trace(path, force):
            for rank, builder in self._ranks.items():
                for table in TABLES:
                    rows = builder.sound_tables_of(table, left_out)
                    write_table(path, rank, table, rows)
            for table, reasons in left_out.items():
                count = counted(len(reasons), "row")
                self.note(f"{count} of {table} left out: {reasons[0]}")
            write_meta(path, meta)
        return open_trace(path)


def _as_columns(table: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows as one part of columns, or none."""
    columns = {
        column.name: [row.get(column.name) for row in rows] for column in TABLES[table]
    }
    return [columns] if rows else []


def arrow_rows(table: str, parts: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Return parts as one Arrow table with the table's types, sorted by time.

    The parts' columns are as of `RankBuilder.extend`. Raises ValueError as `frame`.
    """
    lengths = [_length(part) for part in parts]
    arrays = []
    for column in TABLES[table]:
        chunks = [
            _array(part.get(column.name), length, column)
            for part, length in zip(parts, lengths, strict=True)
        ]
        values = pa.chunked_array(chunks, column.type).unify_dictionaries()
        if values.null_count and not column.nullable:
            raise ValueError(
                f"the table {table} needs a column {column.name}, with a value in "
                "every row"
            )
        arrays.append(values)
    rows = pa.Table.from_arrays(arrays, schema=arrow_schema(table))
    times = rows.column(SORT[table]).to_numpy()
    if (times[1:] >= times[:-1]).all():
        return rows
    return rows.take(pa.array(np.argsort(times, kind="stable")))


def _length(part: Mapping[str, Any]) -> int:
    return max(len(values) for values in part.values() if not _is_one(values))


def _is_one(values: Any) -> bool:
    return values is None or bool(np.isscalar(values))


def _array(values: Any, length: int, column: TraceColumn) -> pa.Array:
    """Return the values of a column as an array of its type."""
    kind = column.type
    if values is None:
        return pa.nulls(length, kind)
    if _is_one(values):
        values = pa.repeat(values, length)
    array = pa.array(values, from_pandas=True)
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    if pa.types.is_dictionary(array.type):
        # With labels that no row has, as they were.
        labels = array.dictionary.cast(pa.string())
        array = pa.DictionaryArray.from_arrays(array.indices.cast(pa.int32()), labels)
        return array if array.type == kind else array.dictionary_decode()
    if pa.types.is_dictionary(kind):
        return array.cast(kind.value_type).dictionary_encode()
    return array.cast(kind)


def _cut(columns: dict[str, Any], start: int, end: int) -> dict[str, Any]:
    """Return some rows of columns, each an array or one value for all rows."""
    # Not by `np.ndim`, which makes an array of a list: of long texts one with the
    # longest text's size for each.
    return {
        name: values if values is None or np.isscalar(values) else values[start:end]
        for name, values in columns.items()
    }


def _joined(
    table: str,
    parts: Iterable[dict[str, Any]],
    rows: list[dict[str, Any]] | None = None,
) -> pd.DataFrame:
    """Return the frame of rows and of columns of rows."""
    import pandas as pd

    from ebbtide.profiler.trace.frames import empty_frame, frame

    columns = [part for part in map(pd.DataFrame, parts) if len(part)]
    types = {tuple(part.dtypes.items()) for part in columns}
    if len(columns) > 1 and len(types) == 1:
        # With the same types nothing is converted, and one frame takes less time.
        columns = [pd.concat(columns)]
    frames = [frame(table, rows)] if rows else []
    frames += [frame(table, part) for part in columns]
    return (
        frame(table, pd.concat(frames))
        if len(frames) > 1
        else frames[0]
        if frames
        else empty_frame(table)
    )
