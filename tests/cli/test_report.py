"""`ebbtide report`: the page that it writes, and the input that it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.analysis.report.report_traces import trained
from tests.conftest import ebbtide_in_process


@pytest.fixture
def run(tmp_path: Path) -> Path:
    trained(ranks=2).write(tmp_path / "run.ebb")
    return tmp_path


def test_report__writes_the_page_and_prints_its_path(run: Path) -> None:
    done = ebbtide_in_process(
        "report", "run.ebb", "-o", "run.html", "--min-bytes", "20GiB", cwd=run
    )
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.startswith("ebbtide: run.html")
    html = (run / "run.html").read_text()
    assert html.startswith("<!doctype html>")
    assert "at least 20.00 GiB of 40.00 GiB" in html
    assert sorted(path.name for path in run.iterdir()) == ["run.ebb", "run.html"]


def test_report__replaces_a_page_only_with_force(run: Path) -> None:
    (run / "run.html").write_text("kept")
    refused = ebbtide_in_process("report", "run.ebb", "-o", "run.html", cwd=run)
    assert (refused.returncode, (run / "run.html").read_text()) == (2, "kept")
    assert "--force" in refused.stderr
    assert (
        ebbtide_in_process(
            "report", "run.ebb", "-o", "run.html", "--force", cwd=run
        ).returncode
        == 0
    )
    assert (run / "run.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("run.ebb", "-o"),
        ("-o run.html", "RUN.ebb"),
        ("nowhere.ebb -o run.html", "does not exist"),
        ("run.ebb -o run.pdf", ".html"),
        ("run.ebb -o run.ebb/meta.json/run.html", "cannot write"),
        ("run.ebb -o run.html --rank 5", "has no rank 5"),
        ("run.ebb -o run.html --rank first", "--rank"),
        ("run.ebb -o run.html --min-bytes some", "some"),
    ],
)
def test_report__bad_input_is_one_line_and_changes_no_file(
    run: Path, arguments: str, message: str
) -> None:
    refused = ebbtide_in_process("report", *arguments.split(), cwd=run)
    assert (refused.returncode, refused.stdout) == (2, "")
    (error,) = refused.stderr.splitlines()
    assert message in error
    assert [path.name for path in run.iterdir()] == ["run.ebb"]
