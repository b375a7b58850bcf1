"""Damaged and hostile files of Nsight Systems: one line says what is wrong, and nothing
is written."""

from __future__ import annotations

import gzip
import sqlite3
from pathlib import Path

import pytest

from ebbtide.features.importers.load import recognize
from ebbtide.features.importers.source import Source, SourceError
from tests.conftest import ebbtide_in_process, examples, seeded
from tests.features.importers.nsys.made_exports import (
    MadeExport,
    import_in_memory,
    training,
)


def message_of(path: Path) -> str:
    with pytest.raises(SourceError) as refused:
        import_in_memory(path)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_cut_off_database__is_refused_with_one_line(tmp_path: Path) -> None:
    whole = training(tmp_path / "whole.sqlite").write().read_bytes()
    cut = tmp_path / "run.sqlite"
    for size in (100, 5000, len(whole) // 2, len(whole) - 1):
        cut.write_bytes(whole[:size])
        done = ebbtide_in_process("import", cut, "-o", tmp_path / "run.ebb")
        assert done.returncode == 2
        (line,) = done.stderr.splitlines()
        assert "cut off" in line
    assert not (tmp_path / "run.ebb").exists()


def test_packed_database__is_unpacked(tmp_path: Path) -> None:
    packed = tmp_path / "run.sqlite.gz"
    content = training(tmp_path / "run.sqlite").write().read_bytes()
    packed.write_bytes(gzip.compress(content))
    assert recognize(Source(packed)) == "nsys"
    assert (
        import_in_memory(packed)
        .kernels(0)
        .equals(import_in_memory(tmp_path / "run.sqlite").kernels(0))
    )
    packed.write_bytes(gzip.compress(content)[:-2000])
    assert "damaged" in message_of(packed)


@pytest.mark.parametrize("suffix", [".nsys-rep", ".qdrep"])
def test_recording__is_refused_with_the_command_that_exports_it(
    tmp_path: Path, suffix: str
) -> None:
    recording = tmp_path / f"run{suffix}"
    recording.write_bytes(b"\x00QuadD\x01\x02" * 100)
    assert recognize(Source(recording)) == "nsys"
    assert "nsys export --type sqlite" in message_of(recording)


def test_csv_report__is_refused_with_the_export_that_it_was_made_from(
    tmp_path: Path,
) -> None:
    report = tmp_path / "run_cuda_gpu_trace.csv"
    report.write_text(
        "\nProcessing [run.sqlite]...\nStart (ns),Duration "
        "(ns),CorrId,Device,Strm,Name\n1,2,3,A (0),7,k\n"
    )
    assert recognize(Source(report)) == "nsys"
    assert "is a report of `nsys stats`: import the SQLite export" in message_of(report)


def test_other_databases__are_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.sqlite"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE runs (id INTEGER)")
    connection.commit()
    connection.close()
    assert "not an export of Nsight Systems" in message_of(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET start = 'soon' WHERE rowid = 2", "values that are not integers"),
        ("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET streamId = 1.5", "values that are not integers"),
        ("UPDATE CUPTI_ACTIVITY_KIND_MEMCPY SET bytes = x'00ff'", "values that are not integers"),
        ("UPDATE NVTX_EVENTS SET text = x'00ff' WHERE rowid = 1", "texts that are not text"),
        ("UPDATE StringIds SET value = x'00ff' WHERE rowid = 1", "values of the wrong type"),
        ("ALTER TABLE CUPTI_ACTIVITY_KIND_MEMCPY DROP COLUMN bytes", "no column bytes"),
        ("DELETE FROM CUPTI_ACTIVITY_KIND_KERNEL; DELETE FROM CUPTI_ACTIVITY_KIND_MEMCPY; DELETE FROM NVTX_EVENTS; "
         "DELETE FROM CUPTI_ACTIVITY_KIND_MEMSET", "neither work of a GPU nor NVTX ranges"),
    ],
)  # fmt: skip
def test_values_of_other_types__are_refused(
    tmp_path: Path, change: str, message: str
) -> None:
    path = training(tmp_path / "run.sqlite").write()
    connection = sqlite3.connect(path)
    connection.executescript(change)
    connection.close()
    assert message in message_of(path)


_ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)"


def test_views_and_computed_columns__are_never_read(tmp_path: Path) -> None:
    path = MadeExport(tmp_path / "run.sqlite").range("forward", 0, 10).write()
    connection = sqlite3.connect(path)
    columns = "i AS start, i AS end, 0 AS deviceId, 0 AS streamId"
    # Reading either would never end, or fill the memory.
    connection.execute(
        f"CREATE VIEW CUPTI_ACTIVITY_KIND_KERNEL AS {_ENDLESS} SELECT {columns} FROM n"
    )
    connection.execute(
        "CREATE TABLE CUPTI_ACTIVITY_KIND_MEMSET (start INTEGER, end INTEGER, deviceId "
        "INTEGER, streamId INTEGER, "
        "globalPid INTEGER AS (length(zeroblob(start * 1000000000))))"
    )
    connection.execute("INSERT INTO CUPTI_ACTIVITY_KIND_MEMSET VALUES (1, 2, 0, 7)")
    connection.commit()
    connection.close()
    trace = import_in_memory(path)
    assert trace.kernels(0)["kind"].tolist() == ["memset"]


def test_file__is_not_changed_and_leaves_no_file_beside_it(tmp_path: Path) -> None:
    path = training(tmp_path / "run.sqlite").write()
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.close()
    content = path.read_bytes()
    import_in_memory(path)
    assert path.read_bytes() == content
    assert [file.name for file in tmp_path.iterdir()] == ["run.sqlite"]


def test_values_of_any_size__do_not_overflow(tmp_path: Path) -> None:
    made = (
        MadeExport(tmp_path / "run.sqlite")
        .session()
        .gpu(0, memory=-5)
        .kernel("k", 10, 20, 5)
    )
    made.copy(1, 30, 40, 1 << 62).copy(1, 50, 60, -1).memory(0, 1, 1 << 62).memory(
        1, 2, -7
    )
    # Times and devices that cannot be.
    made.kernel("late", (1 << 63) - 9, (1 << 63) - 1).kernel(
        "k", 1, 2, deviceId=-4
    ).range("forward", -5, 1 << 63 - 1)
    trace = import_in_memory(made.write())
    assert len(trace.kernels(0)) == 1
    assert trace.phases(0).empty
    assert trace.transfers(0)["bytes"].isna().tolist() == [True, True]
    assert trace.memory(0).empty
    assert trace.rank(0).main_device.capacity_bytes is None


def test_damaged_bytes__give_a_trace_or_one_line(tmp_path: Path) -> None:
    whole = training(tmp_path / "whole.sqlite").write().read_bytes()
    path = tmp_path / "run.sqlite"
    outcomes = []
    for case in range(examples(40, by_default=6)):
        with seeded(case) as random:
            content = bytearray(whole)
            for _ in range(random.choice((1, 4, 40))):
                content[random.randrange(16, len(content))] = random.randrange(256)
            path.write_bytes(content)
            try:
                outcomes.append(str(len(import_in_memory(path).ranks)))
            except SourceError as error:
                outcomes.append(str(error))
    assert not any("\n" in outcome for outcome in outcomes)


def test_schema_with_names_that_are_no_text__is_refused(tmp_path: Path) -> None:
    whole = training(tmp_path / "whole.sqlite").write().read_bytes()
    path = tmp_path / "run.sqlite"
    path.write_bytes(
        whole.replace(
            b"CREATE TABLE NVTX_EVENTS (start",
            b"CREATE TABLE NVTX_EVENTS (\xbe\xf2 )((",
        )
    )
    assert "damaged" in message_of(path)
