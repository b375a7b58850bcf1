"""`ebbtide export` and `ebbtide tables`, from a recorded job to the files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from ebbtide.profiler.trace import TraceBuilder
from tests.cli.test_bad_input import contents, refused
from tests.conftest import ebbtide_in_process, slow_case
from tests.features.export.trace_event_file import check
from tests.profiler.agent.jobs import PRELUDE

JOB = (
    PRELUDE
    + """
for _ in range(6):
    for _ in range(2):
        model(torch.randn(8, 16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a trace of two ranks, a file and a folder."""
    builder = TraceBuilder("recorded")
    for rank in (0, 1):
        one = (
            builder.rank(rank)
            .phase("forward", 0, 2000, 0)
            .transfer("h2d", 10, 500, 64)
            .memory(5, 9)
        )
        one.extend(
            "memory", t_ns=range(3000), device="cpu", pool="rss", bytes=range(3000)
        )
    builder.write(tmp_path / "a.ebb")
    (tmp_path / "file.json").write_text("kept")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "kept").touch()
    (tmp_path / "folder.json").mkdir()
    return tmp_path


def test_export_and_tables__force_replaces_existing_output(folder: Path) -> None:
    assert (
        ebbtide_in_process(
            "export", "a.ebb", "-o", "file.json", "--force", cwd=folder
        ).returncode
        == 0
    )
    check((folder / "file.json").read_text())
    for format in ("csv", "parquet"):
        run = ebbtide_in_process(
            "export", "a.ebb", "-o", "out", "--format", format, "--force", cwd=folder
        )
        assert (run.returncode, run.stdout) == (0, "")
        assert "no table of windows" in run.stderr
        assert (folder / "out" / f"link.{format}").exists()
    assert not (folder / "out" / "link.csv").exists()
    table = pd.read_parquet(folder / "out" / "transfers.parquet")
    assert table[["rank", "bytes"]].values.tolist() == [[0, 64], [1, 64]]


@pytest.mark.parametrize(
    ("command_line", "message"),
    [
        ("export a.ebb", "-o"),
        ("export -o x.json", "RUN.ebb"),
        ("export a.ebb -o x.txt", ".json or .json.gz"),
        ("export a.ebb -o file.json", "--force"),
        ("export a.ebb -o folder.json --force", "is not a file"),
        ("export a.ebb -o file.json/x.json", "cannot write"),
        ("export nowhere.ebb -o x.json", "does not exist"),
        (f"export a.ebb -o {'x' * 300}.json", "cannot write"),
        ("export --format csv a.ebb", "-o"),
        ("export --format csv a.ebb -o folder", "--force"),
        ("export --format csv a.ebb -o folder --force", "is not a folder of tables"),
        ("export --format csv a.ebb -o file.json --force", "is not a folder of tables"),
        ("export --format csv a.ebb -o a.ebb --force", "is not a folder of tables"),
        ("export --format csv a.ebb -o file.json/out", "cannot write"),
        ("export a.ebb -o out.json --min-bytes 1GB", "--min-bytes is for tables"),
        ("export a.ebb -o out --format xlsx", "csv"),
        ("export --format csv a.ebb -o out --min-bytes lots", "lots"),
    ],
)
def test_export_and_tables__bad_input_is_one_line_and_writes_nothing(
    folder: Path, command_line: str, message: str
) -> None:
    before = contents(folder)
    assert message in refused(ebbtide_in_process(*command_line.split(), cwd=folder))
    assert contents(folder) == before


@pytest.mark.parametrize(
    "command_line",
    ["export a.ebb -o x.json", slow_case("export --format csv a.ebb -o out")],
)
def test_export_and_tables__a_full_file_system_leaves_no_partial_output(
    folder: Path, command_line: str
) -> None:
    """A limit on the size of files fails as a full disk does: while writing."""
    before = contents(folder)
    limited = f"ulimit -f 8; exec {sys.executable} -B -m ebbtide {command_line}"
    run = subprocess.run(
        ["bash", "-c", limited],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert "cannot write" in refused(run)
    assert contents(folder) == before
