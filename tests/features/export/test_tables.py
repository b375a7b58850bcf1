"""Tests the exported tables against the trace and its metrics."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.analysis.metrics.summary import summarize
from ebbtide.analysis.metrics.windows import find_windows
from ebbtide.errors import UserError
from ebbtide.features.export.tables import (
    FORMATS,
    iterations_table,
    raw_table,
    write_tables,
)
from ebbtide.phases import ITERATION_PARTS
from ebbtide.profiler.trace import Trace, TraceBuilder
from ebbtide.profiler.trace.schema import TABLES
from tests.conftest import slow_case

MS = 10**6
GIB = 2**30
START = 1_700_000_000_000_000_001
GPU = {"device": "cuda:0", "kind": "cuda", "capacity_bytes": 8 * GIB}
ALL = [*TABLES, "iterations", "windows"]


def trained(gpu_times: bool = False, ranks: int = 2) -> Trace:
    """Three iterations of 1 ms other, 2 ms forward, 4 ms backward and 3 ms update per
    rank."""
    builder = TraceBuilder()
    for rank in range(ranks):
        one = builder.rank(rank, devices=[GPU], first_iteration_start_ns=START)
        now = START
        for number in range(3):
            now += MS
            for phase, length in (("forward", 2), ("backward", 4), ("update", 3)):
                end = now + length * MS
                one.phase(
                    phase, now, end, number, 0, *((now, end) if gpu_times else ())
                )
                one.memory(now, (rank + length) * GIB)
                one.transfer(
                    "h2d", now, now + MS, 100 * length + rank, name='say "h2d", please'
                )
                now = end
        one.add("ops", start_ns=START, end_ns=START + 5, resource="cpu", name="step")
        one.link(START, 10, "gpm", h2d_bytes_per_s=0.1)
        one.gpu(START, utilization_percent=97.5, throttle_reasons=4).gpu(
            START + 5, power_w=402.5
        )
    return builder.build()


def read_table(folder: Path, name: str, format: str) -> pd.DataFrame:
    path = folder / f"{name}.{format}"
    return pd.read_csv(path) if format == "csv" else pd.read_parquet(path)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("gpu_times", [True, slow_case(False)])
def test_write_tables__writes_files_that_pandas_reads_back(
    tmp_path: Path, format: str, gpu_times: bool
) -> None:
    trace = trained(gpu_times)
    assert write_tables(trace, tmp_path / "out", format, GIB) == []
    assert sorted(os.listdir(tmp_path / "out")) == sorted(
        [*(f"{name}.{format}" for name in ALL), "tables.json"]
    )
    expected = {name: raw_table(trace, name) for name in TABLES}
    expected |= {
        "iterations": iterations_table(trace),
        "windows": find_windows(trace, GIB).to_pandas(),
    }
    for name, table in expected.items():
        back = read_table(tmp_path / "out", name, format)
        assert list(back.columns) == list(table.columns)
        assert back.astype(object).where(back.notna(), None).values.tolist() == (
            table.astype(object).where(table.notna(), None).values.tolist()
        )


def test_raw_table__has_every_rank_with_its_number() -> None:
    for name in TABLES:
        trace = trained()
        table = raw_table(trace, name)
        assert list(table.columns) == [
            "rank",
            *(column.name for column in TABLES[name]),
        ]
        for rank in trace.ranks:
            part = (
                table[table["rank"] == rank].drop(columns="rank").reset_index(drop=True)
            )
            pd.testing.assert_frame_equal(part, trace.table(rank, name))
        assert len(table) == sum(len(trace.table(rank, name)) for rank in trace.ranks)


@given(
    st.lists(
        st.lists(st.integers(0, 10**7), min_size=4, max_size=4), min_size=1, max_size=7
    )
)
def test_iterations_table__has_the_medians_of_the_summary(
    lengths: list[list[int]],
) -> None:
    builder = TraceBuilder()
    now = START
    one = builder.rank(0, devices=[GPU], first_iteration_start_ns=now)
    for number, (before, *phases) in enumerate(lengths):
        now += before
        for phase, length in zip(ITERATION_PARTS, phases, strict=False):
            one.phase(phase, now, now + length, number)
            one.memory(now, length)
            now += length
    trace = builder.build()
    summary = summarize(trace)
    table = iterations_table(trace).iloc[summary.warmup_iterations :]
    for phase in summary.phases:
        assert table[f"{phase.phase}_ms"].median() == pytest.approx(phase.median_ms)
        sizes = table[f"{phase.phase}_peak_bytes"].dropna()
        assert phase.peak_bytes == (round(sizes.median()) if len(sizes) else None)
        assert table[f"{phase.phase}_h2d_bytes"].isna().all()
    parts = table[[f"{phase}_ms" for phase in ITERATION_PARTS]].sum(axis=1)
    assert parts.to_numpy() == pytest.approx(table["iteration_ms"].to_numpy())


def test_write_tables__leaves_unrecorded_cells_empty(tmp_path: Path) -> None:
    builder = TraceBuilder()
    builder.rank(0).phase("forward", 0, MS, 0)
    (note,) = write_tables(builder.build("x.ebb"), tmp_path / "out", "csv", GIB)
    assert note.startswith(
        "no table of windows: no memory of a device was recorded; `ebbtide profile` "
        "records it"
    )
    assert not (tmp_path / "out" / "windows.csv").exists()
    assert (tmp_path / "out" / "phases.csv").read_text() == (
        "rank,iteration,micro_step,phase,start_ns,end_ns,gpu_start_ns,gpu_end_ns\n0,0,0,forward,0,1000000,,\n"
    )
    iterations = (tmp_path / "out" / "iterations.csv").read_text().splitlines()
    assert iterations[1] == "0,0,0,1000000,1.0,1.0,,,0.0," + "," * 12
    assert len(iterations) == 2


@pytest.mark.parametrize("format", FORMATS)
def test_write_tables__writes_tables_without_rows_for_an_empty_trace(
    tmp_path: Path, format: str
) -> None:
    write_tables(TraceBuilder().build(), tmp_path / "out", format, GIB)
    for name in (*TABLES, "iterations"):
        table = read_table(tmp_path / "out", name, format)
        assert len(table) == 0
        assert table.columns[0] == "rank"


def test_write_tables__parquet_keeps_dtypes_of_missing_columns(tmp_path: Path) -> None:
    builder = TraceBuilder()
    builder.rank(0).phase("forward", START, START + MS, 0)
    write_tables(builder.build(), tmp_path / "out", "parquet", GIB)
    phases = read_table(tmp_path / "out", "phases", "parquet")
    assert phases["gpu_start_ns"].dtype == "Int64"
    assert phases["start_ns"].tolist() == [START]
    iterations = read_table(tmp_path / "out", "iterations", "parquet")
    assert iterations["update_h2d_bytes"].dtype == "Int64"


def test_write_tables__force_replaces_only_tables(tmp_path: Path) -> None:
    trace = trained(ranks=1)
    out = tmp_path / "out"
    write_tables(trace, out, "csv", GIB)
    with pytest.raises(UserError, match="--force"):
        write_tables(trace, out, "csv", GIB)
    write_tables(trace, out, "parquet", GIB, force=True)
    assert sorted(os.listdir(out)) == sorted(
        [*(f"{name}.parquet" for name in ALL), "tables.json"]
    )
    (out / "my-notes.txt").write_text("kept")
    before = sorted(os.listdir(out))
    with pytest.raises(UserError, match="contains other files"):
        write_tables(trace, out, "csv", GIB, force=True)
    assert sorted(os.listdir(out)) == before
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize(
    "manifest",
    [
        "",
        "[]",
        '{"format": "other"}',
        '{"format": "ebbtide-tables", "files": 3}',
        "[" * 10**5,
    ],
)
def test_write_tables__force_keeps_a_folder_with_a_wrong_manifest(
    tmp_path: Path, manifest: str
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "tables.json").write_text(manifest)
    with pytest.raises(UserError, match="is not a folder of tables"):
        write_tables(trained(ranks=1), tmp_path / "out", "csv", GIB, force=True)
    assert (tmp_path / "out" / "tables.json").read_text() == manifest


def test_write_tables__manifest_describes_the_tables(tmp_path: Path) -> None:
    write_tables(trained(ranks=1), tmp_path / "out", "csv", 5)
    manifest = json.loads((tmp_path / "out" / "tables.json").read_text())
    assert (manifest["trace"], manifest["windows_min_bytes"]) == ("built.ebb", 5)
    assert manifest["free_pool"] == "device"
    assert manifest["files"] == [f"{name}.csv" for name in ALL]
