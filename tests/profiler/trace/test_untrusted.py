"""Folders of traces that somebody else has made: refused in one line, before they take
memory or time."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ebbtide.errors import TraceError
from ebbtide.profiler.trace import Trace, TraceBuilder, open_trace
from ebbtide.profiler.trace.schema import TABLES
from tests.conftest import ebbtide_in_process, examples, run_process
from tests.process_sizes import process_bytes
from tests.profiler.trace.mutations import mutate

TRACES = Path(__file__).parents[3] / "traces"
MS = 1_000_000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    builder = TraceBuilder("recorded")
    rank = builder.rank(0)
    for iteration in range(3):
        start = iteration * 10 * MS
        rank.phase("forward", start, start + MS, iteration).phase(
            "update", start + MS, start + 2 * MS, iteration
        )
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
            rows = rows.set_column(
                position, name, pa.array(column, rows.schema.field(name).type)
            )
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
    columns = {
        name: names if name in texts else zeros
        for name in ("start_ns", "end_ns", *texts)
    }
    pq.write_table(pa.table(columns), file, compression="zstd")


def long_text(file: Path) -> None:
    """Write a kernel whose name has 1 GiB, which takes little on disk."""
    name = pa.array(["k" * (1 << 20)] * 1024)
    numbers = pa.array(range(1024), pa.int64())
    columns = {
        "start_ns": numbers,
        "end_ns": numbers,
        "device": name,
        "kind": name,
        "name": name,
    }
    pq.write_table(pa.table(columns), file, compression="zstd", use_dictionary=False)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (
            replace_file("meta.json", lambda file: file.symlink_to("/dev/zero")),
            "no readable meta.json",
        ),
        (replace_file("meta.json", os.mkfifo), "not a regular file"),
        (
            replace_file("meta.json", lambda file: file.write_bytes(b" " * (33 << 20))),
            "more than 33,554,432",
        ),
        (
            replace_file("meta.json", lambda file: file.write_text("[" * 100_000)),
            "nested too deeply",
        ),
        (replace_file("rank-0/memory.parquet", os.mkfifo), "not a regular file"),
        (
            replace_file(
                "rank-0/memory.parquet", lambda file: file.symlink_to("/dev/zero")
            ),
            "memory.parquet",
        ),
        (
            replace_file(
                "rank-0/kernels.parquet", lambda file: file.symlink_to("/none")
            ),
            "kernels.parquet",
        ),
        (
            edit_meta(lambda meta: meta["ranks"].append(meta["ranks"][0])),
            "rank 0 more than once",
        ),
        (edit_rows("phases", end_ns=-(2**63)), "its times end_ns span"),
        (edit_rows("phases", start_ns=2**62 - 1), "its times start_ns span"),
        (edit_rows("phases", iteration=-5), "iteration has values from -5"),
        (edit_rows("memory", bytes=-1), "bytes has values from -1"),
        (edit_rows("memory", bytes=2**60), "bytes has values from 7"),
        pytest.param(
            replace_file("rank-0/kernels.parquet", long_text),
            "would take",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            replace_file("rank-0/kernels.parquet", equal_rows),
            "20,000,000 rows",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_open_trace__refuses_hostile_files_in_one_line(
    path: Path, damage: Callable[[Path], None], words: str
) -> None:
    damage(path)
    with pytest.raises(TraceError, match=words) as error:
        read_all(open_trace(path))
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_summary__refuses_a_bomb_before_it_takes_memory(path: Path) -> None:
    equal_rows(path / "rank-0" / "kernels.parquet")
    limit = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, 1 << "
        "30)); "
    )
    script = f"{limit}from ebbtide.cli import run; sys.exit(run(sys.argv[1:]))"
    run = run_process(
        [sys.executable, "-c", script, "summary", path, "--by", "activity"]
    )
    assert (run.returncode, run.stdout, run.stderr.count("\n")) == (2, "", 1)
    assert "20,000,000 rows" in run.stderr


def test_stored_bytes__follows_no_link(path: Path) -> None:
    file = path / "rank-0" / "kernels.parquet"
    before = open_trace(path).stored_bytes
    size = file.stat().st_size
    file.unlink()
    file.symlink_to(file.name)
    assert open_trace(path).stored_bytes == before - size + len(file.name)


def test_columns__reads_in_the_calling_thread(tmp_path: Path) -> None:
    """A thread of pyarrow that lets go of an object of Python while the process ends
    would abort it."""
    builder = TraceBuilder("recorded")
    times = np.arange(200_000)
    builder.rank(0).extend(
        "memory", t_ns=times, device="cuda:0", pool="reserved", bytes=times
    ).kernel(0, 1, name="gemm")
    builder.write(tmp_path / "t.ebb")
    script = """
import os, sys
from ebbtide.profiler.trace import open_trace
from ebbtide.profiler.trace.schema import TABLES
trace = open_trace(sys.argv[1])
trace.columns(0, "ops")  # Has no rows.
before = os.listdir("/proc/self/task")
print(sum(len(trace.columns(0, table)) for table in TABLES), trace.labels(0, "kernels", "name"))
assert os.listdir("/proc/self/task") == before
"""
    run = run_process([sys.executable, "-c", script, tmp_path / "t.ebb"])
    assert (run.returncode, run.stdout, run.stderr) == (0, "200001 ['gemm']\n", "")


# Commands that read every table.
COMMANDS = (
    ("summary", "--json"),
    ("summary", "-v"),
    ("findings",),
    ("windows",),
    ("summary", "--by", "activity", "--critical-path"),
    ("memory",),
    ("memory", "--at", "peak"),
)
MAX_BYTES = 1 << 30  # That a command may add to what its process began with.
MAX_CPU_S = 10
# Of a command that waits for another process. The processor has other work, too.
MAX_S = 120


def made_trace(path: Path) -> None:
    """Write a trace with the tables that those of traces/ lack."""
    builder = TraceBuilder("recorded")
    for number in range(3):
        rank = builder.rank(number)
        for iteration in range(6):
            start = iteration * 10 * MS
            rank.phase("forward", start, start + 3 * MS, iteration).phase(
                "backward", start + 3 * MS, start + 7 * MS, iteration
            )
            rank.phase("update", start + 7 * MS, start + 9 * MS, iteration)
            for pool, size in (
                ("allocated", 5 << 30),
                ("reserved", 6 << 30),
                ("device", 7 << 30),
                ("total", 8 << 30),
            ):
                rank.memory(start, size, pool).memory(
                    start + 5 * MS, size + iteration, pool
                )
            rank.gpu(start, utilization_percent=50.0, power_w=300.0).kernel(
                start + MS, start + 2 * MS, name="gemm"
            )
            rank.transfer("h2d", start, start + MS, 1 << 20)
            names = {
                "category": "activations",
                "module": "layers.0",
                "stack": "train.py:1 step",
            }
            rank.add(
                "allocations",
                start_ns=start,
                end_ns=start + 4 * MS,
                device="cuda:0",
                bytes=1 << 20,
                **names,
            )
    builder.write(path)


def problem_of_commands(path: Path) -> str:
    """Run all commands in a child of this process, under limits; return what went
    wrong, or nothing.

    The child begins with this process's memory, which grows with the tests that ran in
    it before."""
    report = path.with_suffix(".txt")
    child = os.fork()
    if not child:
        try:
            begin_bytes = process_bytes("VmRSS")
            most_bytes = process_bytes("VmData") + 2 * MAX_BYTES
            resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_S, MAX_CPU_S))
            resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, most_bytes))
            signal.alarm(MAX_S)
            problems = [
                line for command in COMMANDS if (line := problem(command, path))
            ]
            added_bytes = process_bytes("VmHWM") - begin_bytes
            if added_bytes >= MAX_BYTES:
                problems.append(f"{added_bytes} B more")
            report.write_text("\n".join(problems))
        except BaseException:
            report.write_text(traceback.format_exc())
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return f"status {status}" if status else report.read_text()


def problem(command: tuple[str, ...], path: Path) -> str:
    run = ebbtide_in_process(command[0], path, *command[1:])
    if run.returncode in (0, 2) and run.stderr.count("\n") <= 1:
        return ""
    return f"{' '.join(command)}: exit code {run.returncode}, {run.stderr}"


@pytest.mark.parametrize(
    "name", ["a100-torch-profiler", "a100-13b-async", "h100-20b-async", "made"]
)
def test_commands__survive_mutated_folders(tmp_path: Path, name: str) -> None:
    original = TRACES / f"{name}.ebb"
    if name == "made":
        original = tmp_path / "made.ebb"
        made_trace(original)
    # Children have what this run imports.
    assert not [line for command in COMMANDS if (line := problem(command, original))]
    problems = {}
    for number in range(examples(40, by_default=2)):
        generator = random.Random(f"{name} {number}")
        copy = tmp_path / f"{number}.ebb"
        shutil.copytree(original, copy)
        for _ in range(generator.randrange(1, 3)):
            mutate(copy, generator)
        if line := problem_of_commands(copy):
            problems[number] = line
        else:
            shutil.rmtree(copy)
    assert not problems
