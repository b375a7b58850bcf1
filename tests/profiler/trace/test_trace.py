"""Tests of the tables that a trace keeps in memory."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest

from ebbtide.errors import TraceError
from ebbtide.profiler.trace import Trace, TraceBuilder, open_trace
from ebbtide.profiler.trace import trace as trace_module


def write_ranks(path: Path, ranks: int = 3) -> Path:
    builder = TraceBuilder("recorded")
    for rank in range(ranks):
        for time in range(100):
            builder.rank(rank).memory(
                time, rank + time, "reserved" if time % 2 else "device"
            )
    return builder.write(path).path


def counted(path: Path) -> tuple[Trace, list[tuple[int, str]]]:
    """Open a trace; the list gets the rank and name of each table that is read."""
    stored, reads = open_trace(path), []

    def load(rank: int, name: str) -> pd.DataFrame:
        reads.append((rank, name))
        return stored.table(rank, name)

    return Trace(path, stored.raw_meta, load), reads


def test_table__is_kept_up_to_a_limit_and_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, reads = counted(write_ranks(tmp_path / "t.ebb"))
    size = int(trace.memory(0).memory_usage(index=False).sum())
    for rank in (1, 2, 0, 1, 2):
        trace.memory(rank)
    assert reads == [(0, "memory"), (1, "memory"), (2, "memory")]
    monkeypatch.setattr(trace_module, "_MAX_TABLE_BYTES", 2 * size)
    small, reads = counted(trace.path)
    for rank in (0, 1, 0, 2, 0, 1):
        pd.testing.assert_frame_equal(small.memory(rank), trace.memory(rank))
    # Rank 1 was used least recently when rank 2 was read.
    assert reads == [(0, "memory"), (1, "memory"), (2, "memory"), (1, "memory")]


def test_labels__are_the_values_of_the_column_without_reading_the_table(
    tmp_path: Path,
) -> None:
    path = write_ranks(tmp_path / "t.ebb")
    trace, reads = counted(path)
    assert trace.labels(1, "memory", "pool") == ["device", "reserved"]
    assert reads == [(1, "memory")]
    for opened in (open_trace(path), open_trace(path).of_ranks([1])):
        assert opened.labels(1, "memory", "pool") == ["device", "reserved"]
        assert (
            opened.labels(1, "gpu", "device")
            == opened.labels(1, "link", "source")
            == []
        )
    memory = path / "rank-1" / "memory.parquet"
    pq.write_table(pq.read_table(memory).drop_columns("pool"), memory)
    with pytest.raises(TraceError, match="needs a column pool"):
        open_trace(path).labels(1, "memory", "pool")
    memory.write_bytes(b"PAR1")
    with pytest.raises(TraceError, match=r"memory\.parquet of rank 1 cannot be read"):
        open_trace(path).labels(1, "memory", "pool")


def test_builder__refuses_a_phase_that_ends_before_its_start() -> None:
    with pytest.raises(ValueError, match="ends 5 ns before its start"):
        TraceBuilder().rank(0).phase("forward", 15, 10)
