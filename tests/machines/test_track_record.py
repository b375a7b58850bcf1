"""The record of predictions that ebbtide prints."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from ebbtide.machines.accuracy import ranges_text, track_record, updates_text

ROOT = Path(__file__).parents[2]


def _rows(path: Path) -> dict[str, dict[str, str]]:
    with path.open() as file:
        return {
            row["name"]: row
            for row in csv.DictReader(line for line in file if not line.startswith("#"))
        }


def test_track_record__is_those_of_the_stored_predictions() -> None:
    """The share is counted anew from the predictions that were committed and the times
    that were read after them."""
    is_inside = []
    for path in sorted((ROOT / "benchmarks" / "accuracy").glob("*.predicted.csv")):
        measured_path = path.with_name(path.name.replace("predicted", "measured"))
        if not measured_path.exists():
            continue
        measured = _rows(measured_path)
        for name, row in _rows(path).items():
            is_inside.append(
                float(row["low_s"])
                <= float(measured[name]["step_s"])
                <= float(row["high_s"])
            )
    records = track_record()["iterations"]
    assert records["all"] == {
        "runs": len(is_inside),
        "held": pytest.approx(sum(is_inside) / len(is_inside), abs=5e-4),
    }
    assert sum(
        record["runs"] for name, record in records.items() if name != "all"
    ) == len(is_inside)


def test_texts__are_short_and_are_what_the_page_says() -> None:
    record, updates = track_record()["iterations"]["all"], track_record()["updates"]
    share = f"held {100 * record['held']:.0f} % of {record['runs']:,} runs"
    assert (
        ranges_text() == f"80 % range; {share} of known sources, not tested on others"
    )
    page = (ROOT / "docs" / "accuracy.md").read_text()
    assert share in page
    assert f"mean error {100 * updates['mean_error']:.1f} %" in page
    assert f"{100 * updates['largest_error']:.1f} %" in updates_text()


def test_ranges_text__is_that_of_the_card_or_none() -> None:
    assert "of 823 runs" in (ranges_text("NVIDIA H100 80GB HBM3") or "")
    assert (
        ranges_text("NVIDIA A10")
        == ranges_text("")
        == "80 % range; no run of this card was compared"
    )
