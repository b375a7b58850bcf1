"""Monitor files from text, and what a trace has of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from ebbtide.features.importers.load import import_trace
from ebbtide.profiler.trace import Trace

MIB = 2**20
SECOND = 10**9


def import_text(
    tmp_path: Path, text: str, name: str = "m.txt", **options: Any
) -> Trace:
    file = tmp_path / name
    file.write_text(text)
    return import_trace([file], tmp_path / "m.ebb", force=True, **options)


def memory_rows(
    trace: Trace, rank: int = 0, pool: str = "device"
) -> list[tuple[float, float]]:
    """Return (seconds since the first row, MiB) of a pool."""
    rows = trace.memory(rank)
    rows = rows[rows["pool"] == pool]
    return [
        ((t - rows["t_ns"].min()) / 1e9, size / MIB)
        for t, size in zip(rows["t_ns"], rows["bytes"], strict=True)
    ]


def states(trace: Trace, column: str, rank: int = 0) -> list[float | None]:
    """Return a column of the table `gpu`."""
    return [
        None if pd.isna(value) else float(value)
        for value in trace.table(rank, "gpu")[column]
    ]
