"""Tests of traces on disk: values, replacement, damage, merging."""

from __future__ import annotations

import errno
import json
import shutil
import tempfile
import tracemalloc
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ebbtide.errors import TraceError
from ebbtide.profiler.trace import Trace, TraceBuilder, open_trace
from ebbtide.profiler.trace.files import new_trace, write_rank
from ebbtide.profiler.trace.frames import frame
from ebbtide.profiler.trace.schema import (
    OPTIONAL_TABLES,
    SORT,
    TABLES,
    TraceColumn,
    arrow_schema,
)
from tests.conftest import examples

Rows = dict[str, list[dict[str, Any]]]
Damage = Callable[[Path], Any]

MEMORY = "rank-0/memory.parquet"
LATE = 2**60 + 1  # a time that no float holds
LARGE = 2**50 - 1


def value(column: TraceColumn) -> st.SearchStrategy[Any]:
    present: st.SearchStrategy[Any] = st.text(max_size=5)
    if column.name.endswith("_ns"):
        present = (
            st.integers(-LATE, -LATE + 2**50)
            if column.name != "window_ns"
            else st.integers(0, LARGE)
        )
    elif pa.types.is_integer(column.type):
        present = st.integers(0, LARGE)
    elif pa.types.is_floating(column.type):
        present = st.floats(0, allow_nan=False, allow_infinity=False)
    return st.none() | present if column.nullable else present


def sound(rows: Rows) -> Rows:
    """Let everything end after its start, and iterations ascend in order of time."""
    for row in chain.from_iterable(rows.values()):
        if row.get("end_ns") is not None:
            row["end_ns"] = max(row["end_ns"], row["start_ns"])
    marks = sorted(rows["iteration_marks"], key=lambda row: row["start_ns"])
    for number, row in enumerate(marks):
        row["iteration"] = number
    return rows


rows = st.fixed_dictionaries(
    {
        table: st.lists(
            st.fixed_dictionaries({c.name: value(c) for c in columns}), max_size=4
        )
        for table, columns in TABLES.items()
    }
).map(sound)


def built(rows: Rows) -> TraceBuilder:
    builder = TraceBuilder()
    for table, group in rows.items():
        for row in group:
            builder.rank(0).add(table, **row)
    builder.rank(0)
    return builder


def sample(path: Path, rank: int = 0, wall_offset_ns: Any = 0) -> Trace:
    """Write a small trace, at LATE on its host's clock."""
    meta: dict[str, Any] = (
        {} if wall_offset_ns is None else {"clock": {"wall_offset_ns": wall_offset_ns}}
    )
    builder = TraceBuilder("recorded", host={"name": path.stem}, **meta)
    ranked = builder.rank(rank, first_iteration_start_ns=LATE, started_ns=LATE - 5)
    ranked.phase("forward", LATE, LATE + 3, 0, 0, LATE + 1, LATE + 2).phase(
        "update", LATE + 3, LATE + 9
    )
    ranked.memory(LATE, 7).link(LATE, 1, "gpm", generation=5).transfer(
        "h2d", LATE, LATE + 1, None, stream=3
    )
    ranked.add(
        "ops", start_ns=LATE, end_ns=LATE + 1, resource="cpu", name="adam", parent=0
    )
    ranked.gpu(LATE, utilization_percent=99.5, throttle_reasons=LATE)
    ranked.kernel(LATE, LATE + 1, launch_ns=LATE - 1, stream=7).kernel(
        LATE + 2, LATE + 3, "communication", "nccl"
    )
    ranked.add(
        "calls",
        start_ns=LATE,
        end_ns=LATE + 1,
        name="cudaStreamSynchronize",
        thread=1,
        awaited_ns=LATE - 1,
    )
    ranked.add("iteration_marks", iteration=0, start_ns=LATE, end_ns=LATE + 10)
    ranked.add("annotations", start_ns=LATE, end_ns=LATE + 1, name="loss", thread=1)
    times = {"start_ns": LATE, "end_ns": LATE + 1, "gpu_start_ns": LATE + 1}
    ranked.add("marks", **times, gpu_end_ns=LATE + 2, name="rollout", thread=1)
    ranked.add(
        "allocations",
        start_ns=LATE,
        device="cuda:0",
        bytes=LARGE,
        stack="step (train.py:3)",
    )
    return builder.write(path)


def with_none(data: pd.DataFrame) -> list[dict[str, Any]]:
    return [
        {key: None if pd.isna(v) else v for key, v in row.items()}
        for row in data.to_dict("records")
    ]


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes()
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }


def refusal(act: Callable[[], Any]) -> str:
    """Return the one line of the TraceError that `act` raises."""
    with pytest.raises(TraceError) as error:
        act()
    assert str(error.value).splitlines() == [str(error.value)]
    return str(error.value)


def ordered(rows: Rows, table: str) -> list[dict[str, Any]]:
    blank = dict.fromkeys(column.name for column in TABLES[table])
    return [
        blank | row
        for row in sorted(rows.get(table, []), key=lambda row: row[SORT[table]])
    ]


@settings(max_examples=examples(25, by_default=5))
@given(rows)
def test_open_trace__reads_every_value_sorted_by_time(rows: Rows) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = built({}).write(Path(folder) / "t.ebb").path
        write_rank(
            path,
            0,
            {
                table: frame(table, pd.DataFrame(rows[table], dtype=object))
                for table in TABLES
            },
        )
        trace = open_trace(path)
        assert {table: with_none(trace.table(0, table)) for table in TABLES} == {
            t: ordered(rows, t) for t in TABLES
        }


@given(rows)
@example(
    {
        "phases": [
            {"micro_step": 0, "phase": "", "start_ns": 0, "end_ns": 0, "iteration": i}
            for i in (LATE, None)
        ]
    }
)
def test_trace_builder__keeps_every_digit_of_every_row(rows: Rows) -> None:
    trace = built(rows).build()
    assert {table: with_none(trace.table(0, table)) for table in TABLES} == {
        t: ordered(rows, t) for t in TABLES
    }


times = st.lists(st.integers(0, 30), max_size=40)


@settings(max_examples=examples(25, by_default=5))
@given(st.lists(times.map(sorted), max_size=4), st.none() | times)
def test_write__of_a_large_table_has_row_groups_with_the_same_rows(
    parts: list[list[int]], last: list[int]
) -> None:
    """Rows that are not in order, or single, are written as one group."""
    builder = TraceBuilder()
    rank = builder.rank(0)
    for number, starts in enumerate([*parts, *([last] if last else [])]):
        start_ns, stacks = (
            np.array(starts, np.int64),
            pd.Categorical([f"f{start % 4}" for start in starts]),
        )
        end_ns = pd.array([None if start % 3 else start for start in starts], "Int64")
        columns = {
            "start_ns": start_ns,
            "end_ns": pd.Series(end_ns),
            "stack": stacks,
            "bytes": start_ns + number,
        }
        rank.extend("allocations", device=f"cuda:{number}", **columns)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr("ebbtide.profiler.trace.builder._FRAME_ROWS", 8)
        trace = builder.write(Path(folder) / "t.ebb")
        pd.testing.assert_frame_equal(
            trace.allocations(0), builder.build().allocations(0)
        )
        ordered = last is None or last == sorted(last)
        if ordered and len(trace.columns(0, "allocations")) > 8 * (len(parts) + 1):
            assert (
                pq.ParquetFile(
                    trace.path / "rank-0" / "allocations.parquet"
                ).num_row_groups
                > 1
            )


def test_write__of_a_large_table_with_a_long_text_takes_no_room_for_it_in_each_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ebbtide.profiler.trace.builder._FRAME_ROWS", 8)
    builder = TraceBuilder()
    texts, times = ["f" * 10**6, *["f"] * 63], list(range(64))
    builder.rank(0).extend(
        "allocations", device="cuda:0", start_ns=times, bytes=times, stack=texts
    )
    tracemalloc.start()
    try:
        trace = builder.write(tmp_path / "t.ebb")
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert list(trace.allocations(0)["stack"]) == texts
    assert peak_bytes < 64 * 10**6


@pytest.mark.parametrize("filled", [False, True])
def test_tables__have_the_documented_column_types(tmp_path: Path, filled: bool) -> None:
    path = tmp_path / "t.ebb"
    trace = sample(path) if filled else built({}).write(path)
    for table, columns in TABLES.items():
        file = path / "rank-0" / f"{table}.parquet"
        assert file.exists() == (filled or table not in OPTIONAL_TABLES)
        schema = pq.read_schema(file) if file.exists() else arrow_schema(table)
        assert [(f.name, f.type, f.nullable) for f in schema] == [
            (c.name, c.type, c.nullable) for c in columns
        ]
        for data in (trace.table(0, table), open_trace(path).table(0, table)):
            assert list(data.columns) == [column.name for column in columns]
            for column in columns:
                integer = "Int64" if column.nullable else "int64"
                kinds = {
                    "int64": {integer},
                    "double": {"float64"},
                    "string": {"str", "string", "object"},
                }
                category = column.categorical or pa.types.is_dictionary(column.type)
                assert str(data[column.name].dtype) in (
                    {"category"} if category else kinds[str(column.type)]
                )


def test_trace_builder__refuses_rows_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="is not a phase"):
        TraceBuilder().rank(0).phase("other", 0, 1)
    with pytest.raises(ValueError, match="needs a column pool"):
        built({"memory": [{"t_ns": 0, "device": "cpu", "bytes": 1}]}).build()


@pytest.mark.parametrize("missing", ["t_ns", "device"])
def test_trace_builder__refuses_missing_values_of_required_columns(
    missing: str,
) -> None:
    with pytest.raises(ValueError, match=missing):
        built(
            {
                "memory": [
                    {
                        "t_ns": 0,
                        "device": "cpu",
                        "pool": "heap",
                        "bytes": 1,
                        missing: None,
                    }
                ]
            }
        ).build()


def test_write__force_replaces_only_the_trace_at_the_path(tmp_path: Path) -> None:
    sample(tmp_path / "kept.ebb")
    (tmp_path / "t.ebb").symlink_to(tmp_path / "kept.ebb")
    before = contents(tmp_path / "kept.ebb")
    for size in (8, 9):
        rows = {"memory": [{"t_ns": 1, "device": "cpu", "pool": "heap", "bytes": size}]}
        built(rows).write(tmp_path / "t.ebb", force=True)
        assert list(open_trace(tmp_path / "t.ebb").memory(0)["bytes"]) == [size]
    assert contents(tmp_path / "kept.ebb") == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["kept.ebb", "t.ebb"]


def test_new_trace__of_a_recording_replaces_all_traces_of_the_one_before(
    tmp_path: Path,
) -> None:
    begins = {
        "run.ebb": 7,
        "run-2.ebb": 7,
        "run-3.ebb": 8,
        "run-12.ebb": 7,
        "run-2-2.ebb": 7,
        "run-4.ebb": None,
    }
    for name, begin in begins.items():
        sample(tmp_path / name)
        meta(lambda entry, begin=begin: {**entry, "started_ns": begin})(tmp_path / name)
    (tmp_path / "run-5.ebb").write_text("kept")
    before = contents(tmp_path)

    def fail() -> None:
        with new_trace(tmp_path / "run.ebb", force=True, recording=True):
            assert not (tmp_path / "run-2.ebb").exists()
            raise TraceError("cannot run it")

    assert refusal(fail) == "cannot run it"
    assert contents(tmp_path) == before
    with new_trace(tmp_path / "run.ebb", force=True, recording=True):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("run-2-2.ebb", "run-3.ebb", "run-4.ebb", "run-5.ebb", "run.ebb")
    ]
    # Traces without a beginning are no recordings, and have nothing to do with each
    # other.
    with new_trace(tmp_path / "run-4.ebb", force=True, recording=True):
        pass
    assert (tmp_path / "run-3.ebb").exists()


@pytest.mark.parametrize("step", ["tempfile.mkdtemp", "os.replace"])
def test_write__force_loses_nothing_if_the_parent_folder_is_not_writable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    path = tmp_path / "t.ebb"
    sample(path)
    before = contents(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(step, refused)
        assert "Permission denied" in refusal(lambda: built({}).write(path, force=True))
    assert contents(tmp_path) == before


def raw(name: str, edit: Callable[[bytes], bytes]) -> Damage:
    return lambda path: (path / name).write_bytes(edit((path / name).read_bytes()))


def meta(change: Callable[[dict[str, Any]], Any]) -> Damage:
    return raw("meta.json", lambda text: json.dumps(change(json.loads(text))).encode())


def table(change: Callable[[pa.Table], pa.Table]) -> Damage:
    return lambda path: pq.write_table(
        change(pq.read_table(path / MEMORY)), path / MEMORY
    )


def column(name: str, *values: Any, kind: pa.DataType | None = None) -> Damage:
    return table(
        lambda rows: rows.set_column(
            rows.column_names.index(name), name, pa.array(values, kind)
        )
    )


DAMAGE = [
    pytest.param(shutil.rmtree, "does not exist", id="gone"),
    pytest.param(
        lambda path: (path / "meta.json").unlink(), "not a trace", id="no meta"
    ),
    pytest.param(
        raw("meta.json", lambda text: text[: len(text) // 2]),
        "damaged",
        id="half a meta",
    ),
    pytest.param(
        raw("meta.json", lambda text: b"[" * 200_000),
        "not a trace",
        id="deeply nested meta",
    ),
    pytest.param(meta(lambda value: [value]), "not a trace", id="meta a list"),
    pytest.param(
        meta(lambda value: value | {"schema": 2}), "upgrade", id="newer schema"
    ),
    pytest.param(
        meta(lambda value: value | {"ranks": [{"rank": "0"}]}),
        "ranks[0].rank in its meta.json",
        id="rank is text",
    ),
    pytest.param(
        meta(
            lambda value: (
                value
                | {"ranks": [{"rank": 0, "devices": [{}, {"capacity_bytes": -1}]}]}
            )
        ),
        "damaged: ranks[0].devices[1].capacity_bytes in its meta.json is not valid "
        "(expected int >= 0)",
        id="negative capacity",
    ),
    pytest.param(
        meta(lambda value: value | {"clock": {"wall_offset_ns": "soon"}}),
        "clock.wall_offset_ns",
        id="clock in words",
    ),
    pytest.param(
        meta(lambda value: value | {"host": {"cpu": 3}}),
        "host.cpu in its meta.json",
        id="CPU is a number",
    ),
    pytest.param(
        meta(lambda value: value | {"ranks": [{}]}),
        "missing required field rank",
        id="rank without number",
    ),
    pytest.param(
        meta(lambda value: value | {"\ud800": 1, "notes": 3}),
        "damaged",
        id="half a surrogate pair",
    ),
    pytest.param(
        meta(lambda value: value | {"warmup_iterations": 10**400}),
        "warmup_iterations in",
        id="endless number",
    ),
    pytest.param(
        lambda path: (path / MEMORY).unlink(),
        "memory.parquet is missing",
        id="no table",
    ),
    pytest.param(
        raw(MEMORY, lambda text: text[: len(text) // 2]), "damaged", id="half a table"
    ),
    pytest.param(
        raw(MEMORY, lambda text: bytes(range(256)) * 9),
        "damaged",
        id="garbage for a table",
    ),
    pytest.param(
        table(lambda rows: rows.drop_columns(["bytes"])),
        "needs a column bytes",
        id="column missing",
    ),
    pytest.param(column("bytes", "many"), "damaged", id="words for bytes"),
    pytest.param(column("t_ns", None, kind=pa.int64()), "damaged", id="no time"),
    pytest.param(column("bytes", 1.5), "damaged", id="fractions for bytes"),
    pytest.param(column("device", 3), "damaged", id="number for a device"),
    pytest.param(column("device", None, kind=pa.string()), "damaged", id="no device"),
]


def test_open_trace__of_a_file_says_how_it_becomes_a_trace(tmp_path: Path) -> None:
    file = tmp_path / "a snapshot.pickle"
    file.write_bytes(b"")
    assert f"ebbtide import '{file}' -o run.ebb" in refusal(lambda: open_trace(file))


def test_open_trace__reads_large_tables_column_by_column(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, reads = sample(tmp_path / "t.ebb"), []
    read = pq.ParquetFile.read
    monkeypatch.setattr("ebbtide.profiler.trace.files._LARGE_ROWS", 0)
    monkeypatch.setattr("ebbtide.profiler.trace.files._SMALL_BYTES", 0)
    monkeypatch.setattr(
        pq.ParquetFile,
        "read",
        lambda file, names, **how: reads.append(names) or read(file, names, **how),
    )
    trace = open_trace(tmp_path / "t.ebb")
    for table in TABLES:
        pd.testing.assert_frame_equal(trace.table(0, table), written.table(0, table))
    assert {len(names) for names in reads} == {1}


@pytest.fixture(scope="module")
def undamaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("undamaged") / "t.ebb"
    sample(path)
    for table in TABLES:
        open_trace(path).table(0, table)
    return path


@pytest.mark.parametrize(("damage", "says"), DAMAGE)
def test_open_trace__reports_damage_on_one_line(
    tmp_path: Path, undamaged: Path, damage: Damage, says: str
) -> None:
    def read() -> None:
        for table in TABLES:
            open_trace(tmp_path / "t.ebb").table(0, table)

    shutil.copytree(undamaged, tmp_path / "t.ebb")
    damage(tmp_path / "t.ebb")
    text = refusal(read)
    assert says in text
    assert str(tmp_path / "t.ebb") in text


def test_open_trace__reads_a_trace_without_the_optional_tables(tmp_path: Path) -> None:
    trace = sample(tmp_path / "t.ebb")
    before = open_trace(trace.path)
    for table in OPTIONAL_TABLES:
        assert len(before.table(0, table)) > 0
        (trace.path / "rank-0" / f"{table}.parquet").unlink()
    after = open_trace(trace.path)
    for table in OPTIONAL_TABLES:
        pd.testing.assert_frame_equal(after.table(0, table), frame(table))
    for table in TABLES.keys() - OPTIONAL_TABLES:
        pd.testing.assert_frame_equal(after.table(0, table), before.table(0, table))


def test_open_trace__reports_a_damaged_optional_table(tmp_path: Path) -> None:
    trace = sample(tmp_path / "t.ebb")
    raw("rank-0/gpu.parquet", lambda text: text[: len(text) // 2])(trace.path)
    assert "gpu.parquet of rank 0 cannot be read" in refusal(
        lambda: open_trace(trace.path).gpu(0)
    )
