"""Wall clocks that jump: daylight saving time, other zones, a clock that is set."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.analysis.metrics.iterations import slowest_times
from ebbtide.analysis.metrics.summary import summarize
from ebbtide.features.importers.clocks import WallClock, mended_times
from ebbtide.features.importers.load import import_trace

SECOND = 1_000_000_000
HOUR = 3600 * SECOND
YEAR = 365 * 24 * HOUR


@given(
    st.lists(st.integers(1, 20 * SECOND), min_size=5, max_size=20),
    st.integers(4, 19),
    st.sampled_from([-HOUR, HOUR, -9 * HOUR, 11 * HOUR, -HOUR // 2, -15 * HOUR // 4]),
)
def test_wall_clock__takes_jumps_by_zones_back_exactly(
    intervals: list[int], at: int, by: int
) -> None:
    times = pd.Series([0, *intervals]).cumsum()
    read = times.where(times.index <= at, times + by)
    clock = WallClock()
    assert [clock.mended(t) for t in read] == times.tolist()
    assert [jump.by_ns for jump in clock.jumps] == [by] * (at < len(intervals))


@pytest.mark.parametrize("by", [-77 * SECOND, 50 * YEAR, -50 * YEAR - 1234])
def test_wall_clock__goes_on_a_usual_interval_after_other_jumps(by: int) -> None:
    times = [n * SECOND for n in range(10)]
    clock = WallClock()
    read = [t if n < 6 else t + by for n, t in enumerate(times)]
    assert [clock.mended(t) for t in read] == times
    assert not clock.jumps[0].is_zone


@pytest.mark.parametrize("pause_s", [10, 1_799, 5_000, 86_000])
def test_wall_clock__keeps_pauses(pause_s: int) -> None:
    times = [n * SECOND + (n > 5) * pause_s * SECOND for n in range(12)]
    clock = WallClock()
    assert [clock.mended(t) for t in times] == times
    assert clock.jumps == []


def test_mended_times__leaves_files_in_another_order() -> None:
    times = pd.Series([9, 8, 7, 6, 5], dtype="Int64") * HOUR
    mended, jumps = mended_times(times, pd.Series([0.0] * 5))
    assert (mended.tolist(), jumps) == (times.tolist(), [])


def monitor(times: list[int], zone: str = "") -> str:
    rows = [f"{pd.Timestamp(t):%Y/%m/%d %H:%M:%S}.000{zone}, 0, 7 MiB" for t in times]
    return "\n".join(["timestamp, index, memory.used [MiB]", *rows, ""])


@pytest.mark.parametrize("by", [-HOUR, HOUR])
def test_import__mends_the_clock_of_a_monitor_and_says_so(
    tmp_path: Path, by: int
) -> None:
    times = [1_761_440_000 * SECOND + n * SECOND + (n > 20) * by for n in range(40)]
    file = tmp_path / "smi.csv"
    file.write_text(monitor(times))
    trace = import_trace([file], tmp_path / "t.ebb")
    assert trace.memory(0)["t_ns"].diff().dropna().eq(SECOND).all()
    notes = [line for line in trace.notes if "has a clock" in line]
    assert len(notes) == 1
    assert f"{'back' if by < 0 else 'forward'} by 1 h (daylight" in notes[0]


def timers(stamp: str) -> str:
    return f"{stamp}[Rank 0] time (ms) | fwd: 400.00 | bwd: 500.00 | step: 50.00\n"


def test_import__mends_the_clock_of_a_log(tmp_path: Path) -> None:
    times = [1_761_440_000 * SECOND + n * 2 * SECOND for n in range(40)]
    stamps = [pd.Timestamp(t - (n > 20) * HOUR) for n, t in enumerate(times)]
    file = tmp_path / "job.log"
    file.write_text("".join(timers(f"[{t:%Y-%m-%d %H:%M:%S},000] ") for t in stamps))
    trace = import_trace([file], tmp_path / "t.ebb")
    assert set(slowest_times(trace).columns["iteration"]) == {2000.0}
    assert sum("has a clock that goes back by 1 h" in n for n in trace.notes) == 1
    # Lines that state their zone say themselves when it changed.
    zones = [("+01:00", 1) if n > 20 else ("+02:00", 2) for n in range(40)]
    stamps = [
        pd.Timestamp(t + zone[1] * HOUR) for t, zone in zip(times, zones, strict=True)
    ]
    lines = [
        timers(f"{t:%Y-%m-%dT%H:%M:%S}.0{zone} ")
        for t, (zone, _) in zip(stamps, zones, strict=True)
    ]
    file.write_text("".join(lines))
    trace = import_trace([file], tmp_path / "t.ebb", force=True)
    assert set(slowest_times(trace).columns["iteration"]) == {2000.0}
    assert not [line for line in trace.notes if "has a clock" in line]


def test_summarize__knows_no_gaps_of_a_log_without_times(tmp_path: Path) -> None:
    file = tmp_path / "job.log"
    file.write_text(timers("") * 6)
    phases = summarize(import_trace([file], tmp_path / "t.ebb")).as_json()["phases"]
    assert {phase["phase"]: phase["median_ms"] for phase in phases} == {
        "forward": 400.0,
        "backward": 500.0,
        "update": 50.0,
        "other": None,
    }
