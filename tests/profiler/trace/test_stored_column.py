"""Columns in files, compared with arrays."""

import numpy as np
import pandas as pd
import pytest

from ebbtide.profiler.trace import TraceBuilder
from ebbtide.profiler.trace.schema import TABLES
from ebbtide.profiler.trace.stored_column import StoredColumn, blocks_of


def stored(numbers: list[int]) -> StoredColumn:
    column = StoredColumn("q", len(numbers) + 5)
    for start in range(len(numbers) - len(numbers) % 7, -1, -7):
        column.prepend(numbers[start : start + 7])
    return column


@pytest.mark.parametrize("in_memory", [True, False])
def test_stored_column__has_the_values_of_an_array(monkeypatch: pytest.MonkeyPatch, in_memory: bool) -> None:
    monkeypatch.setattr("ebbtide.profiler.trace.stored_column._MAX_BYTES_IN_MEMORY", 1 << 20 if in_memory else 0)
    monkeypatch.setattr("ebbtide.profiler.trace.stored_column._BLOCK_ROWS", 8)
    numbers = [*range(50)]
    column = stored(numbers)
    assert (len(column), np.ndim(column), np.size(column)) == (50, 1, 50)
    assert column[:].tolist() == numbers
    assert column[10:20].tolist() == numbers[10:20]
    assert int(column[49]) == 49
    assert np.concatenate([*blocks_of(column + 7)]).tolist() == [number + 7 for number in numbers]


def test_rank_builder__makes_the_frames_of_arrays_from_stored_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ebbtide.profiler.trace.builder._FRAME_ROWS", 8)
    times, sizes = [*range(0, 300, 3)], [*range(100)]
    frames = []
    for columns in (
        {"t_ns": np.array(times), "bytes": np.array(sizes)},
        {"t_ns": stored(times), "bytes": stored(sizes)},
    ):
        rank = TraceBuilder().rank(0)
        rank.extend("memory", device="cuda:0", pool="requested", **columns)
        rank.extend("memory", t_ns=np.array([0, 40, 500]), device="cuda:0", pool="reserved", bytes=1)
        frames.append([*rank.frames_of("memory")])
        assert len(frames[-1]) > 10
    assert pd.concat(frames[0]).equals(pd.concat(frames[1]))
    assert [*frames[0][0]] == [column.name for column in TABLES["memory"]]
