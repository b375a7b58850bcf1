"""Times of the rows of monitor files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import slow_case
from tests.features.importers.nvml_monitor.test_importer import (
    DMON,
    GIB,
    SECOND,
    START,
    import_text,
    used,
    without,
)


def test_read_times__continues_over_midnight(tmp_path: Path) -> None:
    text = without(DMON, "Date")
    trace = import_text(tmp_path, text)
    assert [t % (86_400 * SECOND) for t in trace.memory(1)["t_ns"]] == [
        t % (86_400 * SECOND) for t in (START, START + SECOND)
    ]
    assert (
        "m.csv has times of day without dates (dmon -o DT writes both)" in trace.notes
    )
    over = text.replace("00:52:40", "23:59:59").replace("00:52:41", "00:00:01")
    times = import_text(tmp_path, over).memory(1)["t_ns"]
    assert list(times - times.iloc[0]) == [0, 2 * SECOND]
    # One device after the other: that the second begins where the first began is no
    # midnight.
    rows = [
        f"{hour:02}:00:00  {device}  {hour}"
        for device in (0, 1)
        for hour in (1, 9, 17, 23)
    ]
    trace = import_text(
        tmp_path, "#Time  gpu  fb\n#HH:MM:SS  Idx  MB\n" + "\n".join(rows)
    )
    assert list(trace.memory(0)["t_ns"]) == list(trace.memory(1)["t_ns"])


def test_assume_times__spaces_samples_by_1_s(tmp_path: Path) -> None:
    trace = import_text(tmp_path, without(DMON, "Date", "Time"))
    assert list(trace.memory(1)["t_ns"]) == [0, SECOND]
    assert (
        "m.csv has no times (dmon -o DT writes them): its samples are assumed to be 1 "
        "s apart" in trace.notes
    )


@pytest.mark.parametrize(
    ("unit", "digits", "decimals"),
    [
        slow_case("s", 10, ""),
        ("s", 10, ".25"),
        ("ms", 13, ""),
        slow_case("ms", 13, ".5"),
        slow_case("us", 16, ""),
        ("ns", 19, ""),
    ],
)
def test_read_times__reads_unix_times_in_every_unit(
    tmp_path: Path, unit: str, digits: int, decimals: str
) -> None:
    power = {"s": 9, "ms": 6, "us": 3, "ns": 0}[unit]
    stamps = [f"{(START + n * SECOND) // 10**power}{decimals}" for n in range(3)]
    assert len(stamps[0].split(".")[0]) == digits
    rows = [f"0,{stamp},{5 * GIB}" for stamp in stamps]
    # A line that was cut within its time is not of 1970.
    trace = import_text(
        tmp_path,
        "device_id,timestamp,mem_used\n"
        + "\n".join(rows)
        + f"\n0,{stamps[0][: digits - 1]}",
    )
    fraction = float(f"0{decimals}") * 10**power / 1e9 if decimals else 0.0
    assert used(trace) == [(n + fraction, 5 * 1024.0) for n in range(3)]
    assert [note for note in trace.notes if "left out" in note] == [
        "m.csv has rows that cannot be read, which are left out: 1"
    ]
    assert not [note for note in trace.notes if "zone" in note]


@pytest.mark.parametrize(
    ("stamp", "seconds", "zoned"),
    [
        slow_case("2024-04-15T00:52:41Z", 1, True),
        ("2024-04-15T02:52:41.5+02:00", 1.5, True),
        slow_case("2024-04-15 00:52:41", 1, False),
        ("20240415 00:52:41", 1, False),
    ],
)
def test_read_times__reads_dates_with_and_without_a_zone(
    tmp_path: Path, stamp: str, seconds: float, zoned: bool
) -> None:
    trace = import_text(tmp_path, f"time,gpu,mem_used\n{stamp},0,{GIB}\n")
    assert used(trace) == [(seconds, 1024.0)]
    assert any("without a time zone" in note for note in trace.notes) != zoned
