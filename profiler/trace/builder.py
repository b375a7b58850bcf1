"""Builds a trace from rows; importers, simulated traces and tests use it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ebbtide.phases import PHASES
from ebbtide.profiler.trace.columns import Columns
from ebbtide.profiler.trace.files import new_trace, open_trace, write_meta, write_table
from ebbtide.profiler.trace.metadata import parse_meta
from ebbtide.profiler.trace.schema import SORT, TABLES
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
        # A time near all others, by the first table that is written.
        self._typical_ns: int | None = None

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

    def frames_of(self, table: str) -> Iterator[pd.DataFrame]:
        """Yield the rows so far as frames in the order of time.

        A large table gives several: one takes too much memory.
        """
        parts = self._columns[table]
        times = [np.asarray(part[SORT[table]]) for part in parts]
        longest = max(times, key=np.size, default=np.empty(0))
        if (
            longest.size <= _FRAME_ROWS
            or self._rows[table]
            or not all((np.diff(own) >= 0).all() for own in times)
        ):
            yield self.frame(table)
            return
        limits = longest[_FRAME_ROWS::_FRAME_ROWS]
        cuts = [pairwise([0, *np.searchsorted(own, limits), len(own)]) for own in times]
        for bounds in zip(*cuts, strict=True):
            frame = _joined(
                table,
                [_cut(part, *rows) for part, rows in zip(parts, bounds, strict=True)],
            )
            texts = frame.select_dtypes("category").items()
            yield frame.assign(
                **{
                    name: column.cat.remove_unused_categories()
                    for name, column in texts
                }
            )

    def sound_frames_of(
        self, table: str, left_out: Mapping[str, list[str]]
    ) -> Iterator[pd.DataFrame]:
        """Yield `frames_of` without the rows that readers would refuse. The reason for
        each is added to `left_out`, by table."""
        for frame in self.frames_of(table):
            refused = np.zeros(len(frame), bool)
            columns = Columns(table, frame)
            if self._typical_ns is None and len(columns):
                self._typical_ns = int(columns.ints(SORT[table])[len(columns) // 2])
            for reason, rows in flaws(table, columns, self._typical_ns):
                left_out[table].extend([reason] * int((rows & ~refused).sum()))
                refused |= rows
            yield frame[~refused].reset_index(drop=True) if refused.any() else frame

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
                    frames = builder.sound_frames_of(table, left_out)
                    write_table(path, rank, table, frames)
            for table, reasons in left_out.items():
                rows = counted(len(reasons), "row")
                self.note(f"{rows} of {table} left out: {reasons[0]}")
            write_meta(path, meta)
        return open_trace(path)


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
