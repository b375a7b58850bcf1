"""Tests of the view at two sizes, on real panels: charts, keys, states, and what it
costs to be without colour."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from ebbtide.features.live.view.app import LiveView
from ebbtide.features.live.view.panels import level_rows
from ebbtide.profiler.recording.lifecycle import finish
from tests.conftest import slow, slow_case
from tests.features.live.recording.growing import (
    BACKWARD_MS,
    FORWARD_MS,
    OTHER_MS,
    UPDATE_MS,
    GrowingRecording,
)
from tests.features.live.view.screens import drive, make_view

NARROW, WIDE = (80, 24), (200, 50)
ITERATIONS = 30
SLOW_MS = 20
STEP_MS = FORWARD_MS + BACKWARD_MS + UPDATE_MS + OTHER_MS
PUBLISHED = Path(__file__).parents[4] / "traces"
TRACES = sorted(path.name for path in PUBLISHED.glob("*.ebb"))


def is_slow(iteration: int) -> bool:
    return iteration % 7 == 6


def make_recording(folder: Path) -> GrowingRecording:
    recording = GrowingRecording(folder / "run.ebb")
    recording.begin()
    recording.add_rank(0, ITERATIONS, slow_ms=SLOW_MS)
    recording.add_rank(1, ITERATIONS)
    recording.add_sampler(ITERATIONS * (STEP_MS + 2))
    # Its last phase and its end are not written yet.
    recording.grow_to(0.97)
    return recording


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> GrowingRecording:
    return make_recording(tmp_path_factory.mktemp("view"))


@pytest.fixture(scope="module")
def wide_rows(recording: GrowingRecording) -> list[str]:
    (rows,) = drive(make_view(recording.path), WIDE)
    return rows


@pytest.fixture(scope="module")
def narrow_rows(recording: GrowingRecording) -> list[str]:
    """Return the rows at 80x24, without colour."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_COLOR", "1")
        view = make_view(recording.path)
        assert view.no_color
        (rows,) = drive(view, NARROW)
    return rows


@pytest.mark.parametrize(
    ("name", "size", "bars"),
    [slow_case("narrow_rows", NARROW, 3), ("wide_rows", WIDE, 10)],
)
def test_view__shows_every_panel_at_both_sizes(
    request: pytest.FixtureRequest, name: str, size: tuple[int, int], bars: int
) -> None:
    rows = request.getfixturevalue(name)
    text = "\n".join(rows)
    # Each row has the width of the terminal at most.
    assert max(map(len, rows)) <= size[0]
    for words in (
        "run.ebb",
        "rank 0 of 2 on cuda:0",
        "F forward 10.0",
        "Memory  device",
        "of 16.00 GiB",
        "h2d",
        "d2h",
    ):
        assert words in text
    for words in (
        "At least 1.00 GiB free in every iteration",
        "Findings of the last iterations: 2",
        "q quit",
    ):
        assert words in text
    assert "of device memory are free all the time" in text
    # Letters tell phases apart, also without colour.
    assert len(re.findall(r"^\d+ +[\d.]+ ms ·+F+B+U+", text, re.MULTILINE)) == bars
    assert re.search(r"\b0 cuda:0 +\w+ +\d", text)
    assert re.search(r"\b1 cuda:0 +\w+ +\d", text)


def test_view__bars_have_the_lengths_of_the_phases(wide_rows: list[str]) -> None:
    bars = {
        int(match[1]): match[2]
        for row in wide_rows
        if (match := re.match(r"(\d+) +[\d.]+ ms ([·FBU]+)", row))
    }
    assert len(bars) == 10
    # The longest of the bars has the whole width.
    columns = max(map(len, bars.values()))
    longest_ms = STEP_MS + SLOW_MS
    assert any(is_slow(number) for number in bars)
    for number, bar in bars.items():
        update_ms = UPDATE_MS + (SLOW_MS if is_slow(number) else 0)
        lengths_ms = {"·": OTHER_MS, "F": FORWARD_MS, "B": BACKWARD_MS, "U": update_ms}
        for letter, length_ms in lengths_ms.items():
            assert abs(bar.count(letter) - length_ms / longest_ms * columns) <= 1


def test_view__keys_select_ranks_zoom_and_open_pages(
    recording: GrowingRecording,
) -> None:
    view = make_view(recording.path)
    first, second, back, fewer, findings, closed, page = drive(
        view, NARROW, ["n", "p", "minus", "f", "escape", "question_mark"]
    )
    assert "rank 0 of 2" in first[0]
    assert "rank 1 of 2" in second[0]
    assert "rank 0 of 2" in back[0]
    assert any(row.startswith(">   1") for row in second)
    # Ten iterations are shown at first, five then.
    ruler, zoomed = (
        next(row for row in rows if "phase " in row and "F" in row)
        for rows in (back, fewer)
    )
    assert [len(re.findall("B+", letters)) for letters in (ruler, zoomed)] == [10, 5]
    assert any("steady iteration" in row for row in findings)
    assert closed[0] == fewer[0]
    assert any("previous rank" in row for row in page)


def test_view__follows_the_recording_to_its_end_and_pauses(tmp_path: Path) -> None:
    recording = make_recording(tmp_path)
    view = make_view(recording.path)

    async def run() -> None:
        async def shows(state: str) -> None:
            for _ in range(600):
                if view.snapshot.state == state:
                    return
                await pilot.pause(0.05)
            pytest.fail(f"the view shows {view.snapshot.state}, not {state}")

        async with view.run_test(size=NARROW) as pilot:
            await pilot.press("space")
            before = view.snapshot
            recording.grow_to(1)
            finish(recording.path, {})
            await pilot.pause(1.5)
            assert view.snapshot is before
            await pilot.press("space")
            await shows("complete")
            assert [figures.iteration for figures in view.snapshot.ranks] == [
                ITERATIONS - 1
            ] * 2

    asyncio.run(run())


def test_view__waits_for_a_trace_and_ends_with_an_error_that_it_cannot_read(
    tmp_path: Path,
) -> None:
    view = make_view(tmp_path / "later.ebb")
    (rows,) = drive(view, NARROW)
    assert any("which does not exist yet" in row for row in rows)

    async def run(damaged: LiveView) -> None:
        async with damaged.run_test(size=NARROW) as pilot:
            (tmp_path / "later.ebb").mkdir()
            (tmp_path / "later.ebb" / "meta.json").write_text("{")
            for _ in range(600):
                if damaged.return_value is not None:
                    break
                await pilot.pause(0.05)

    damaged = make_view(tmp_path / "later.ebb")
    asyncio.run(run(damaged))
    assert "is damaged" in str(damaged.return_value)
    assert damaged.return_code == 2


@pytest.mark.parametrize("name", slow(TRACES, but=[]))
def test_view__shows_finished_and_imported_traces(name: str) -> None:
    (rows,) = drive(make_view(PUBLISHED / name), NARROW)
    assert "complete" in rows[0]
    assert any(row.startswith("Findings of the trace") for row in rows)


def test_level_rows__fill_from_the_bottom_and_show_the_least_amount() -> None:
    top, bottom = level_rows([0.0, 1e-6, 0.5, 0.75, 1.0, float("nan")], 2)
    assert bottom == " ▁███ "
    assert top == "   ▄█ "
