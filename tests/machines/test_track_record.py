"""The record of predictions that ebbtide prints."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from ebbtide.machines import track_record
from ebbtide.machines.track_record import record_of, track_records, updates_text

ROOT = Path(__file__).parents[2]


def _rows(path: Path) -> dict[str, dict[str, str]]:
    with path.open() as file:
        return {row["name"]: row for row in csv.DictReader(line for line in file if not line.startswith("#"))}


def test_track_records__are_those_of_the_stored_predictions() -> None:
    """The share is counted anew from the predictions that were committed and the times that were read after them."""
    held = []
    for path in sorted((ROOT / "benchmarks" / "accuracy").glob("*.predicted.csv")):
        measured_path = path.with_name(path.name.replace("predicted", "measured"))
        if not measured_path.exists():
            continue
        measured = _rows(measured_path)
        for name, row in _rows(path).items():
            held.append(float(row["low_s"]) <= float(measured[name]["step_s"]) <= float(row["high_s"]))
    record = track_records()["all"]
    assert (record.runs, record.held) == (len(held), pytest.approx(sum(held) / len(held), abs=5e-4))
    assert sum(one.runs for name, one in track_records().items() if name != "all") == record.runs


def test_text__is_short_and_is_what_the_page_says() -> None:
    record = track_records()["all"]
    assert record.text() == f"80 % range; held {100 * record.held:.0f} % of {record.runs:,} runs predicted blind"
    page = (ROOT / "docs" / "accuracy.md").read_text()
    assert f"held {100 * record.held:.0f} % of {record.runs:,} runs" in page
    values = json.loads(Path(track_record.__file__).with_suffix(".json").read_text())
    assert f"mean error {100 * values['updates']['mean_error']:.1f} %" in page
    assert f"{100 * values['updates']['largest_error']:.1f} %" in updates_text()


def test_record_of__is_none_for_cards_without_runs() -> None:
    assert record_of("NVIDIA H100 80GB HBM3") == track_records()["H100 80GB HBM3"]
    assert record_of("NVIDIA A10") is None
    assert record_of(None) is None
