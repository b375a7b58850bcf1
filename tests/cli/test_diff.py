"""`ebbtide diff`, for people and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ebbtide.analysis.diff import compare
from ebbtide.cli.diff import headline
from ebbtide.profiler.trace import Trace, open_trace
from ebbtide.units import bytes_text, ms_text
from tests.analysis.test_diff import made, trained
from tests.cli.test_bad_input import contents, refused
from tests.conftest import ebbtide, ebbtide_in_process


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Two traces on disk whose updates take 10 and 20 ms."""
    for name, update, command in (("a.ebb", 10, ["python", "a [/b].py"]), ("b.ebb", 20, ["python", "b.py"])):
        builder = made([update + number % 2 for number in range(7)], command=command)
        builder.rank(0, model={"params": 1234567})
        builder.write(tmp_path / name)
    return tmp_path


def test_json_is_the_comparison_and_nothing_else(place: Path) -> None:
    run = ebbtide("diff", "a.ebb", "b.ebb", "--json", cwd=place)
    assert (run.returncode, run.stderr) == (0, "")
    expected = compare(open_trace(place / "a.ebb"), open_trace(place / "b.ebb")).as_json()
    assert json.loads(run.stdout) == {**expected, "a": "a.ebb", "b": "b.ebb"}


def test_people_read_the_largest_change_first(place: Path) -> None:
    run = ebbtide_in_process("diff", "a.ebb", "b.ebb", cwd=place)
    assert (run.returncode, run.stderr) == (0, "")
    lines = [line.strip() for line in run.stdout.splitlines()]
    assert lines[0] == "A: a.ebb, 5 counted iterations"
    assert lines[2] == "Largest change: update takes 20.0 ms in B and 10.0 ms in A, 2.00 times as much."
    rows = {line.split("  ")[0]: line for line in lines}
    assert "+10.0 ms" in rows["update"]
    assert "beyond the spread" in rows["update"]
    assert "within the spread" in rows["backward"]
    assert bytes_text(700) in rows["peak device"]
    assert "'a [/b].py'" in rows["command"]
    assert "model.params" not in run.stdout
    same = ebbtide_in_process("diff", "a.ebb", "a.ebb", cwd=place)
    assert "No time differs by more than the spread" in same.stdout
    assert "Not the same" not in same.stdout


@pytest.mark.parametrize(
    ("a", "b", "says"),
    [
        (trained([10] * 5), trained([11] * 5), f"update takes {ms_text(11)} in B and {ms_text(10)} in A, 1.10 times"),
        (trained([10] * 5), trained([10] * 5, peak=1400), "the peak of device memory is 1.37 KiB in B and 700 B in A"),
        (trained([10] * 5, moved=0), trained([10] * 5, moved=9), "update moves h2d 9 B in B and 0 B in A."),
        (trained([10] * 5), trained([10] * 5, peak=703), "No time differs"),
        (trained([10] * 2), trained([90] * 2), "cannot be told"),
        (trained([]), trained([]), "cannot be told"),
    ],
)
def test_the_headline(a: Trace, b: Trace, says: str) -> None:
    assert says in headline(compare(a, b))


@pytest.mark.parametrize(
    ("line", "says"),
    [("diff a.ebb", "B.ebb"), ("diff a.ebb nowhere.ebb", "does not exist"), ("diff a.ebb b.ebb c.ebb", "c.ebb")],
)
def test_bad_input_is_one_line(place: Path, line: str, says: str) -> None:
    before = contents(place)
    assert says in refused(ebbtide_in_process(*line.split(), cwd=place))
    assert contents(place) == before
