"""`ebbtide diff`: text and JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ebbtide.features.diff.comparison import compare
from ebbtide.features.diff.tables import headline
from ebbtide.profiler.trace import Trace, TraceBuilder, open_trace
from ebbtide.units import bytes_text, ms_text
from tests.cli.test_bad_input import contents, refused
from tests.conftest import ebbtide_in_process
from tests.features.diff.test_diff import trained, with_updates


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two traces on disk whose updates take 10 and 20 ms."""
    for name, update, command in (
        ("a.ebb", 10, ["python", "a [/b].py"]),
        ("b.ebb", 20, ["python", "b.py"]),
    ):
        builder = with_updates(
            [update + number % 2 for number in range(7)], command=command
        )
        builder.rank(0, model={"params": 1234567})
        builder.write(tmp_path / name)
    return tmp_path


def test_diff__json_is_the_comparison(folder: Path) -> None:
    run = ebbtide_in_process("diff", "a.ebb", "b.ebb", "--json", cwd=folder)
    assert (run.returncode, run.stderr) == (0, "")
    expected = compare(
        open_trace(folder / "a.ebb"), open_trace(folder / "b.ebb")
    ).as_json()
    assert json.loads(run.stdout) == {
        **expected,
        "a": "a.ebb",
        "b": "b.ebb",
        "failures": None,
    }


def test_diff__text_begins_with_the_largest_change(folder: Path) -> None:
    run = ebbtide_in_process("diff", "a.ebb", "b.ebb", cwd=folder)
    assert (run.returncode, run.stderr) == (0, "")
    lines = [text.strip() for text in run.stdout.splitlines()]
    assert lines[0] == "An iteration takes 51.2 ms in B and 41.2 ms in A, 1.24x slower."
    assert lines[1] == "A: a.ebb, 5 counted iterations"
    assert lines[-1] == "next: ebbtide findings b.ebb"
    rows = {row.split("  ")[0]: row for row in lines}
    assert rows["update"].split()[1:] == [
        "10.0",
        "20.0",
        "+10.0",
        "2.00",
        "+9.00",
        "to",
        "+11.0",
        "differs",
    ]
    assert "may be noise" in rows["backward"]
    assert "peak device" not in rows
    verbose = ebbtide_in_process("diff", "a.ebb", "b.ebb", "-v", cwd=folder).stdout
    assert ["peak", "device", "700", "700", "0", "1.00"] in [
        row.split() for row in verbose.splitlines()
    ]
    assert "'a [/b].py'" in rows["command"]
    assert "model.params" not in run.stdout
    same = ebbtide_in_process("diff", "a.ebb", "a.ebb", cwd=folder)
    assert "No difference of times can be told apart from noise." in same.stdout
    assert "Differences of the setup" not in same.stdout


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (
            trained([10] * 5),
            trained([11] * 5),
            f"An iteration takes {ms_text(42.1)} in B and {ms_text(41.1)} in A, 1.02x "
            "slower.",
        ),
        (
            trained([10] * 5),
            trained([10] * 5, peak=1400),
            "the peak of device memory is 1.37 KiB in B and 700 B in A",
        ),
        (
            trained([10] * 5, moved=0),
            trained([10] * 5, moved=9),
            "update copies h2d 9 B in B and 0 B in A.",
        ),
        (trained([10] * 5), trained([10] * 5, peak=703), "No difference of times"),
        (trained([10] * 2), trained([90] * 2), "cannot be compared"),
        (trained([]), trained([]), "cannot be compared"),
    ],
)
def test_headline__is_the_largest_change(a: Trace, b: Trace, message: str) -> None:
    assert message in headline(compare(a, b))


@pytest.mark.parametrize(
    ("command_line", "message"),
    [
        ("diff a.ebb", "B.ebb"),
        ("diff a.ebb nowhere.ebb", "does not exist"),
        ("diff a.ebb b.ebb c.ebb", "c.ebb"),
    ],
)
def test_diff__bad_input_is_one_line(
    folder: Path, command_line: str, message: str
) -> None:
    before = contents(folder)
    assert message in refused(ebbtide_in_process(*command_line.split(), cwd=folder))
    assert contents(folder) == before


def test_diff__prints_totals_of_traces_without_iterations(tmp_path: Path) -> None:
    for name, size in (("a", 10**6), ("b", 3 * 10**6)):
        builder = TraceBuilder()
        builder.rank(0).transfer("h2d", 0, 10**6, size)
        builder.write(tmp_path / f"{name}.ebb")
    run = ebbtide_in_process("diff", "a.ebb", "b.ebb", cwd=tmp_path)
    assert (run.returncode, run.stderr) == (0, "")
    (row,) = [
        text for text in run.stdout.splitlines() if "bytes to the device (h2d)" in text
    ]
    assert row.split()[-4:] == ["0.95", "2.86", "+1.91", "3.00"]
    assert "Median times" not in run.stdout
    printed = ebbtide_in_process("summary", "a.ebb", cwd=tmp_path).stdout
    assert f"bytes to the device (h2d) {bytes_text(10**6)}" in " ".join(printed.split())


def test_diff__fails_above_limits_of_traces_and_stored_summaries(folder: Path) -> None:
    stored = ebbtide_in_process("summary", "a.ebb", "--json", cwd=folder).stdout
    (folder / "a.json").write_text(stored)
    assert json.loads(stored)["iterations_ms"] == [
        31.0 + 10 + n % 2 + n % 3 / 10 for n in range(2, 7)
    ]
    for base in ("a.ebb", "a.json"):
        words = [
            "diff",
            base,
            "b.ebb",
            "--fail-if",
            "update>50%",
            "--fail-if",
            "peak_device>1%",
        ]
        run = ebbtide_in_process(*words, cwd=folder)
        assert run.returncode == 1
        assert run.stdout.startswith("FAIL: update above the limit.\nLimits\n")
        (failure,) = json.loads(
            ebbtide_in_process(*words, "--json", cwd=folder).stdout
        )["failures"]
        assert (failure["quantity"], failure["a"], failure["b"], failure["share"]) == (
            "update",
            10,
            20,
            1,
        )
        assert 0.5 < failure["low_share"] <= 1
    same = ebbtide_in_process(
        "diff", "a.json", "a.ebb", "--fail-if", "update>5%", cwd=folder
    )
    assert (same.returncode, same.stdout.splitlines()[0]) == (
        0,
        "PASS: all limits are kept.",
    )
    expected, printed = (
        json.loads(
            ebbtide_in_process("diff", base, "b.ebb", "--json", cwd=folder).stdout
        )
        for base in ("a.ebb", "a.json")
    )
    assert printed == {
        **expected,
        "a": "a.json",
        "facts": [],
        "totals": printed["totals"],
    }


def test_diff__markdown_has_no_markup_of_the_job(folder: Path) -> None:
    printed = ebbtide_in_process(
        "diff", "a.ebb", "b.ebb", "--fail-if", "update>50%", "--markdown", cwd=folder
    ).stdout
    lines = printed.splitlines()
    assert lines[0] == "**FAIL: update above the limit.**"
    assert lines[4] == "| quantity | A | B | B - A | at least | limit | verdict |"
    assert "| command | python 'a \\[/b\\].py' | python b.py |" in lines
    assert lines[2] == "<details open><summary>Limits</summary>"
    assert lines.count("</details>") == printed.count("<details") > 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "has no iterations"),
        ("[]", "not a JSON object"),
        ('{"iterations": "x"}', "iterations"),
        ("{", "not JSON"),
    ],
)
def test_diff__refuses_other_json(folder: Path, content: str, message: str) -> None:
    (folder / "s.json").write_text(content)
    assert message in refused(ebbtide_in_process("diff", "a.ebb", "s.json", cwd=folder))
    assert "is not a limit" in refused(
        ebbtide_in_process("diff", "a.ebb", "b.ebb", "--fail-if", "up", cwd=folder)
    )
