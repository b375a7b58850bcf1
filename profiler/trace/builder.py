"""Making a trace from rows at hand: what tests and importers use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from ebbtide.profiler.trace.files import new_trace, write_meta, write_rank
from ebbtide.profiler.trace.reader import Trace
from ebbtide.profiler.trace.schema import TABLES, frame


class RankBuilder:
    """Collects the rows of one rank. Times are ns, sizes bytes; every method returns the builder."""

    def __init__(self, meta: dict[str, Any]) -> None:
        self.meta = meta
        self._rows: dict[str, list[dict[str, Any]]] = {table: [] for table in TABLES}
        self._columns: dict[str, list[dict[str, Any]]] = {table: [] for table in TABLES}

    def add(self, table: str, **row: Any) -> RankBuilder:
        """Add a row; a column that the row lacks must be one that may be missing."""
        self._rows[table].append(row)
        return self

    def extend(self, table: str, **columns: Any) -> RankBuilder:
        """Add many rows at once, as columns (arrays of one length, or one value for all of them)."""
        self._columns[table].append(columns)
        return self

    def frame(self, table: str) -> pd.DataFrame:
        """The rows so far. Raises ValueError for rows that do not fit the table."""
        parts = [pd.DataFrame(columns) for columns in self._columns[table]]
        parts = [frame(table, self._rows[table]), *(frame(table, part) for part in parts if len(part))]
        return frame(table, pd.concat(parts)) if len(parts) > 1 else parts[0]

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
        if phase not in ("forward", "backward", "update"):
            raise ValueError(f"{phase!r} is not a phase: forward, backward or update")
        times = {
            "start_ns": start_ns,
            "end_ns": end_ns,
            "gpu_start_ns": gpu_start_ns,
            "gpu_end_ns": gpu_end_ns,
        }
        return self.add("phases", phase=phase, iteration=iteration, micro_step=micro_step, **times)

    def memory(self, t_ns: int, size: int, pool: str = "device", device: str = "cuda:0") -> RankBuilder:
        return self.add("memory", t_ns=t_ns, device=device, pool=pool, bytes=size)

    def link(self, t_ns: int, window_ns: int, source: str, device: str = "cuda:0", **rates: Any) -> RankBuilder:
        """rates: h2d_bytes_per_s, d2h_bytes_per_s, generation, width, where known."""
        return self.add("link", t_ns=t_ns, device=device, source=source, window_ns=window_ns, **rates)

    def transfer(
        self,
        direction: str,
        start_ns: int,
        end_ns: int,
        size: int | None,
        device: str = "cuda:0",
        **more: Any,
    ) -> RankBuilder:
        """more: host_memory ("pinned", "pageable"), stream, name, where known."""
        self.meta["transfers_recorded"] = True
        row = {
            "start_ns": start_ns,
            "end_ns": end_ns,
            "device": device,
            "direction": direction,
            "bytes": size,
        }
        return self.add("transfers", **{"name": direction, **row, **more})


class TraceBuilder:
    """Builds a trace in memory (`build`) or on disk (`write`).

    source: "recorded", "imported" or "simulated". meta: further keys of the trace's meta.
    """

    def __init__(self, source: str = "imported", **meta: Any) -> None:
        self.meta: dict[str, Any] = {"state": "complete", "source": source, "notes": [], **meta}
        self._ranks: dict[int, RankBuilder] = {}

    def rank(self, rank: int = 0, **meta: Any) -> RankBuilder:
        """The builder of one rank, made at the first call. meta: devices and further keys of its entry."""
        if rank not in self._ranks:
            self._ranks[rank] = RankBuilder({"rank": rank, "devices": [], "transfers_recorded": False})
        self._ranks[rank].meta.update(meta)
        return self._ranks[rank]

    @property
    def ranks(self) -> dict[int, RankBuilder]:
        return self._ranks

    def note(self, line: str) -> None:
        """Say what is missing or odd, for people."""
        if line not in self.meta["notes"]:
            self.meta["notes"].append(line)

    def build(self, path: str | Path = "built.ebb") -> Trace:
        """The trace in memory; `path` is only what it calls itself. Raises ValueError for rows that do not fit."""
        order = sorted(self._ranks)
        frames = {(r, t): self._ranks[r].frame(t) for r in order for t in TABLES}
        meta = {**self.meta, "ranks": [self._ranks[r].meta for r in order]}
        return Trace(Path(path), meta, lambda rank, table: frames[rank, table])

    def write(self, path: str | Path, force: bool = False) -> Trace:
        """The trace on disk. Raises TraceError where `path` is taken or cannot be written."""
        trace = self.build(path)
        with new_trace(trace.path, force):
            for rank in trace.ranks:
                write_rank(trace.path, rank, {table: trace.table(rank, table) for table in TABLES})
            write_meta(trace.path, trace.meta)
        return trace
