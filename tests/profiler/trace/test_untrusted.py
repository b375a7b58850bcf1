"""Folders of traces that somebody else has made: refused in one line, before they take memory or time."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ebbtide.errors import TraceError
from ebbtide.profiler.trace import Trace, TraceBuilder, open_trace
from ebbtide.profiler.trace.schema import TABLES
from tests.conftest import examples, run_process

TRACES = Path(__file__).parents[3] / "traces"
MS = 1_000_000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    builder = TraceBuilder("recorded")
    rank = builder.rank(0)
    for iteration in range(3):
        start = iteration * 10 * MS
        rank.phase("forward", start, start + MS, iteration).phase("update", start + MS, start + 2 * MS, iteration)
        rank.memory(start, 7).kernel(start, start + 1, name="gemm")
    builder.write(tmp_path / "t.ebb")
    return tmp_path / "t.ebb"


def read_all(trace: Trace) -> None:
    for rank in trace.ranks:
        for table in TABLES:
            trace.columns(rank, table)


def edit_meta(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        meta = json.loads((path / "meta.json").read_text())
        change(meta)
        (path / "meta.json").write_text(json.dumps(meta))

    return damage


def edit_rows(table: str, **values: Any) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        file = path / "rank-0" / f"{table}.parquet"
        rows = pq.read_table(file)
        for name, value in values.items():
            column = [value, *rows.column(name).to_pylist()[1:]]
            position = rows.column_names.index(name)
            rows = rows.set_column(position, name, pa.array(column, rows.schema.field(name).type))
        pq.write_table(rows, file)

    return damage


def replace_file(name: str, make: Callable[[Path], Any]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        (path / name).unlink()
        make(path / name)

    return damage


def equal_rows(file: Path) -> None:
    """Write 20 M equal kernels, which take less than 1 MB on disk."""
    rows = 20_000_000
    zeros = pa.chunked_array([pa.array([0] * 1000, pa.int64())] * (rows // 1000))
    names = pa.chunked_array([pa.array(["k"] * 1000)] * (rows // 1000))
    texts = ("device", "kind", "name")
    columns = {name: names if name in texts else zeros for name in ("start_ns", "end_ns", *texts)}
    pq.write_table(pa.table(columns), file, compression="zstd")


def long_text(file: Path) -> None:
    """Write a kernel whose name has 1 GiB, which takes little on disk."""
    name = pa.array(["k" * (1 << 20)] * 1024)
    numbers = pa.array(range(1024), pa.int64())
    columns = {"start_ns": numbers, "end_ns": numbers, "device": name, "kind": name, "name": name}
    pq.write_table(pa.table(columns), file, compression="zstd", use_dictionary=False)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (replace_file("meta.json", lambda file: file.symlink_to("/dev/zero")), "no readable meta.json"),
        (replace_file("meta.json", os.mkfifo), "not a regular file"),
        (replace_file("meta.json", lambda file: file.write_bytes(b" " * (33 << 20))), "more than 33,554,432"),
        (replace_file("meta.json", lambda file: file.write_text("[" * 100_000)), "nested too deeply"),
        (replace_file("rank-0/memory.parquet", os.mkfifo), "not a regular file"),
        (replace_file("rank-0/memory.parquet", lambda file: file.symlink_to("/dev/zero")), "memory.parquet"),
        (replace_file("rank-0/kernels.parquet", lambda file: file.symlink_to("/none")), "kernels.parquet"),
        (edit_meta(lambda meta: meta["ranks"].append(meta["ranks"][0])), "rank 0 more than once"),
        (edit_rows("phases", end_ns=-(2**63)), "its times end_ns span"),
        (edit_rows("phases", start_ns=2**62 - 1), "its times start_ns span"),
        (edit_rows("phases", iteration=-5), "iteration has values from -5"),
        (edit_rows("memory", bytes=-1), "bytes has values from -1"),
        (edit_rows("memory", bytes=2**60), "bytes has values from 7"),
        pytest.param(replace_file("rank-0/kernels.parquet", long_text), "would take", marks=pytest.mark.slow),
        pytest.param(replace_file("rank-0/kernels.parquet", equal_rows), "20,000,000 rows", marks=pytest.mark.slow),
    ],
)
def test_open_trace__refuses_hostile_files_in_one_line(path: Path, damage: Callable[[Path], None], words: str) -> None:
    damage(path)
    with pytest.raises(TraceError, match=words) as error:
        read_all(open_trace(path))
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_summary__refuses_a_bomb_before_it_takes_memory(path: Path) -> None:
    equal_rows(path / "rank-0" / "kernels.parquet")
    limit = "import resource, sys; resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, 1 << 30)); "
    script = f"{limit}from ebbtide.cli import run; sys.exit(run(sys.argv[1:]))"
    run = run_process([sys.executable, "-c", script, "summary", path, "--by", "activity"])
    assert (run.returncode, run.stdout, run.stderr.count("\n")) == (2, "", 1)
    assert "20,000,000 rows" in run.stderr


def mutate(folder: Path, generator: random.Random) -> None:
    """Damage one file of a trace: its bytes, its length, or what it is."""
    file = generator.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
    data = bytearray(file.read_bytes())
    kind = generator.randrange(6)
    if kind == 0:
        for _ in range(generator.randrange(1, 20)):
            data[generator.randrange(len(data))] = generator.randrange(256)
    elif kind == 1:
        del data[generator.randrange(len(data)) :]
    elif kind == 2:
        place = generator.randrange(len(data))
        data[place:place] = generator.randbytes(generator.randrange(1, 200))
    elif kind == 3 and file.suffix == ".json":
        words = data.decode().split(",")
        others = ('"x":1e999', '"x":-1', "null", '"rank":99999999999999999999', "[]", "{}", '"\\ud800"')
        words[generator.randrange(len(words))] = generator.choice(others)
        data = bytearray(",".join(words).encode())
    elif kind == 4:
        file.unlink()
        generator.choice((lambda: file.symlink_to("/dev/zero"), lambda: os.mkfifo(file), file.mkdir, lambda: None))()
        return
    else:
        other = generator.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
        data = bytearray(other.read_bytes())
    file.write_bytes(data)


@pytest.mark.parametrize("name", ["a100-torch-profiler", "a100-13b-async", "h100-20b-async"])
def test_commands__survive_mutated_folders(tmp_path: Path, name: str) -> None:
    from tests.conftest import ebbtide_in_process

    generator = random.Random(name)
    for number in range(examples(40, by_default=6)):
        copy = tmp_path / f"{number}.ebb"
        shutil.copytree(TRACES / f"{name}.ebb", copy)
        for _ in range(generator.randrange(1, 3)):
            mutate(copy, generator)
        for command in ("summary", "findings"):
            run = ebbtide_in_process(command, copy)
            assert run.returncode in (0, 2), (command, number)
            assert run.stderr.count("\n") <= 1, (command, number)
        shutil.rmtree(copy)
