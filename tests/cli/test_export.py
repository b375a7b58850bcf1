"""`ebbtide export` and `ebbtide tables`, from a recorded job to the files."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from ebbtide.profiler.trace import TraceBuilder
from tests.analysis.export.trace_event_file import check
from tests.cli.test_bad_input import contents, refused
from tests.conftest import Recorded, ebbtide, ebbtide_in_process

JOB = """
    import torch

    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(6):
        for _ in range(2):
            model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a trace of two ranks, a file and a folder."""
    builder = TraceBuilder("recorded")
    for rank in (0, 1):
        one = builder.rank(rank).phase("forward", 0, 2000, 0).transfer("h2d", 10, 500, 64).memory(5, 9)
        one.extend("memory", t_ns=range(3000), device="cpu", pool="rss", bytes=range(3000))
    builder.write(tmp_path / "a.ebb")
    (tmp_path / "file.json").write_text("kept")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "kept").touch()
    (tmp_path / "folder.json").mkdir()
    return tmp_path


def test_a_recorded_job_opens_in_perfetto_and_in_pandas(record: Callable[..., Recorded], tmp_path: Path) -> None:
    job = record(JOB)
    run = ebbtide("export", job.path, "-o", "x.json.gz", cwd=tmp_path)
    assert (run.returncode, run.stdout) == (0, "")
    text = gzip.decompress((tmp_path / "x.json.gz").read_bytes()).decode()
    check(text)
    events = json.loads(text)["traceEvents"]
    assert Counter(e["cat"] for e in events if e["ph"] == "X") == {"iteration": 6, "phase": 30}
    memory = Counter(e["name"] for e in events if e["ph"] == "C")
    assert memory == Counter(f"memory cpu {pool}" for pool in job.trace.memory(0)["pool"])
    run = ebbtide("tables", job.path, "-o", "out", "--min-bytes", "1MB", cwd=tmp_path)
    assert (run.returncode, run.stdout) == (0, "")
    phases = pd.read_csv(tmp_path / "out" / "phases.csv")
    assert phases["start_ns"].tolist() == job.trace.phases(0)["start_ns"].tolist()
    assert len(pd.read_csv(tmp_path / "out" / "iterations.csv")) == 6
    assert len(pd.read_csv(tmp_path / "out" / "windows.csv")) > 0


def test_force_replaces_what_stands(place: Path) -> None:
    assert ebbtide_in_process("export", "a.ebb", "-o", "file.json", "--force", cwd=place).returncode == 0
    check((place / "file.json").read_text())
    for format in ("csv", "parquet"):
        run = ebbtide_in_process("tables", "a.ebb", "-o", "out", "--format", format, "--force", cwd=place)
        assert (run.returncode, run.stdout) == (0, "")
        assert "no table of windows" in run.stderr
        assert (place / "out" / f"link.{format}").exists()
    assert not (place / "out" / "link.csv").exists()
    table = pd.read_parquet(place / "out" / "transfers.parquet")
    assert table[["rank", "bytes"]].values.tolist() == [[0, 64], [1, 64]]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("export a.ebb", "-o"),
        ("export -o x.json", "RUN.ebb"),
        ("export a.ebb -o x.txt", ".json or .json.gz"),
        ("export a.ebb -o file.json", "--force"),
        ("export a.ebb -o folder.json --force", "is not a file"),
        ("export a.ebb -o nowhere/x.json", "cannot write"),
        ("export nowhere.ebb -o x.json", "does not exist"),
        (f"export a.ebb -o {'x' * 300}.json", "cannot write"),
        ("tables a.ebb", "-o"),
        ("tables a.ebb -o folder", "--force"),
        ("tables a.ebb -o folder --force", "is not a folder of tables"),
        ("tables a.ebb -o file.json --force", "is not a folder of tables"),
        ("tables a.ebb -o a.ebb --force", "is not a folder of tables"),
        ("tables a.ebb -o nowhere/out", "cannot write"),
        ("tables a.ebb -o out --format xlsx", "csv or parquet"),
        ("tables a.ebb -o out --min-bytes lots", "lots"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(place: Path, line: str, says: str) -> None:
    before = contents(place)
    assert says in refused(ebbtide_in_process(*line.split(), cwd=place))
    assert contents(place) == before


@pytest.mark.parametrize("line", ["export a.ebb -o x.json", "tables a.ebb -o out"])
def test_a_file_system_that_is_full_leaves_nothing_half_written(place: Path, line: str) -> None:
    """With a limit on the size of files, which is met as a full disk is: while writing."""
    before = contents(place)
    limited = f"ulimit -f 8; exec {sys.executable} -B -m ebbtide {line}"
    run = subprocess.run(["bash", "-c", limited], cwd=place, capture_output=True, text=True, timeout=240, check=False)
    assert "cannot write" in refused(run)
    assert contents(place) == before


def test_neither_command_imports_torch_or_matplotlib(place: Path) -> None:
    for line in ("export a.ebb -o x.json", "tables a.ebb -o out"):
        command = [sys.executable, "-X", "importtime", "-m", "ebbtide", *line.split()]
        run = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=240, check=False)
        assert run.returncode == 0
        imported = {row.rpartition("|")[2].strip() for row in run.stderr.splitlines() if row.startswith("import time:")}
        assert "pandas" in imported
        assert not imported & {"torch", "matplotlib"}
    assert sorted(os.listdir(place)) == ["a.ebb", "file.json", "folder", "folder.json", "out", "x.json"]
