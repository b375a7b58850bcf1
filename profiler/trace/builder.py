"""Builds a trace from rows; importers, simulated traces and tests use it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ebbtide.phases import PHASES
from ebbtide.profiler.trace.files import new_trace, open_trace, write_meta, write_rank
from ebbtide.profiler.trace.metadata import parse_meta
from ebbtide.profiler.trace.schema import TABLES
from ebbtide.profiler.trace.trace import Trace

if TYPE_CHECKING:
    import pandas as pd


class RankBuilder:
    """Collects the rows of one rank. Times are ns, sizes bytes.

    Attributes:
        meta: The rank's entry of meta.json; callers may change it.
    """

    def __init__(self, meta: dict[str, Any]) -> None:
        self.meta = meta
        self._rows: dict[str, list[dict[str, Any]]] = {table: [] for table in TABLES}
        self._columns: dict[str, list[dict[str, Any]]] = {table: [] for table in TABLES}

    def add(self, table: str, **row: Any) -> RankBuilder:
        """Add a row and return the builder. Only nullable columns may be left out."""
        self._rows[table].append(row)
        return self

    def extend(self, table: str, **columns: Any) -> RankBuilder:
        """Add many rows as columns and return the builder. A column is an array, or one value for all rows."""
        self._columns[table].append(columns)
        return self

    def parts(self) -> Iterator[dict[str, Any]]:
        """Yield the rows so far as they were added: single rows, and columns of rows. Callers may change values."""
        for table in TABLES:
            yield from self._rows[table]
            yield from self._columns[table]

    def frame(self, table: str) -> pd.DataFrame:
        """Return the rows so far. Raises ValueError for rows that do not fit the table."""
        import pandas as pd

        from ebbtide.profiler.trace.frames import empty_frame, frame

        parts = [frame(table, self._rows[table])] if self._rows[table] else []
        parts += [frame(table, rows) for rows in map(pd.DataFrame, self._columns[table]) if len(rows)]
        return frame(table, pd.concat(parts)) if len(parts) > 1 else parts[0] if parts else empty_frame(table)

    def frames(self) -> dict[str, pd.DataFrame]:
        """Return the rows so far of all tables."""
        return {table: self.frame(table) for table in TABLES}

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
        """Add a phase and return the builder. The GPU's times are those of the same two points on the device."""
        if phase not in PHASES:
            raise ValueError(f"{phase!r} is not a phase: {', '.join(PHASES)}")
        times = {"start_ns": start_ns, "end_ns": end_ns, "gpu_start_ns": gpu_start_ns, "gpu_end_ns": gpu_end_ns}
        return self.add("phases", phase=phase, iteration=iteration, micro_step=micro_step, **times)

    def memory(self, t_ns: int, size: int, pool: str = "device", device: str = "cuda:0") -> RankBuilder:
        """Add the bytes of a pool from a time on, and return the builder."""
        return self.add("memory", t_ns=t_ns, device=device, pool=pool, bytes=size)

    def link(self, t_ns: int, window_ns: int, source: str, device: str = "cuda:0", **rates: Any) -> RankBuilder:
        """Add a sample of a link's counters and return the builder.

        Args:
            t_ns: The end of the window.
            window_ns: The length of the window.
            source: The kind of counters: `nvml-counters`, `gpm` or `nvml-throughput`.
            device: The GPU.
            rates: h2d_bytes_per_s, d2h_bytes_per_s, generation and width, where they were recorded.
        """
        return self.add("link", t_ns=t_ns, device=device, source=source, window_ns=window_ns, **rates)

    def gpu(self, t_ns: int, device: str = "cuda:0", **values: Any) -> RankBuilder:
        """Add a sample of a GPU's state and return the builder.

        Args:
            t_ns: The time of the sample.
            device: The GPU.
            values: utilization_percent, power_w and other columns of the table `gpu`, where they were recorded.
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
    ) -> RankBuilder:
        """Add work on a GPU and return the builder.

        Args:
            start_ns: The start, in device time.
            end_ns: The end, in device time.
            kind: `compute`, `communication`, `copy` (within or between GPUs) or `memset`.
            name: The name of the kernel.
            device: The GPU.
            launch_ns: The start of the call that launched it; None where not recorded.
            stream: The stream; None where not recorded.
            group: The process group of a collective; None where not recorded.
        """
        row = {"start_ns": start_ns, "end_ns": end_ns, "kind": kind, "name": name, "device": device}
        return self.add("kernels", **row, launch_ns=launch_ns, stream=stream, group=group)

    def transfer(
        self, direction: str, start_ns: int, end_ns: int, size: int | None, device: str = "cuda:0", **columns: Any
    ) -> RankBuilder:
        """Add a copy between host and device and return the builder; the rank then counts as recording transfers.

        Args:
            direction: `h2d` or `d2h`.
            start_ns: The start, in device time.
            end_ns: The end, in device time.
            size: Bytes; None where not recorded.
            device: The GPU.
            columns: host_memory ("pinned", "pageable"), stream, launch_ns and name, where they were recorded.
        """
        self.meta["transfers_recorded"] = True
        row = {"start_ns": start_ns, "end_ns": end_ns, "device": device, "direction": direction, "bytes": size}
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
        self.meta: dict[str, Any] = {"state": "complete", "source": source, "notes": [], **meta}
        self._ranks: dict[int, RankBuilder] = {}

    def rank(self, rank: int = 0, **meta: Any) -> RankBuilder:
        """Return the builder of one rank. meta: `devices` and further keys of its entry, which replace earlier ones."""
        if rank not in self._ranks:
            self._ranks[rank] = RankBuilder({"rank": rank, "devices": [], "transfers_recorded": False})
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
        """Return the trace in memory. Raises ValueError for rows that do not fit; `path` is only used in messages."""
        frames = {rank: builder.frames() for rank, builder in self._ranks.items()}
        return Trace(Path(path), self._raw_meta(), lambda rank, table: frames[rank][table])

    def _raw_meta(self) -> dict[str, Any]:
        return {**self.meta, "ranks": [self._ranks[rank].meta for rank in sorted(self._ranks)]}

    def write(self, path: str | Path, force: bool = False) -> Trace:
        """Write the trace and return it. Raises TraceError where `path` exists or cannot be written, and
        for metadata that does not fit the format."""
        path, meta = Path(path), self._raw_meta()
        parse_meta(meta, path)
        with new_trace(path, force):
            for rank, builder in self._ranks.items():
                write_rank(path, rank, builder.frames())
            write_meta(path, meta)
        return open_trace(path)
