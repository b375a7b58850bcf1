"""Times of phases, from timers, memory marks and the times of lines."""

from __future__ import annotations

import datetime
import re
from pathlib import Path

import pytest

from ebbtide.features.deepspeed.setup import deepspeed_of
from tests.features.deepspeed.log_importer.made_logs import (
    DATA,
    MS,
    PLAIN,
    import_log,
    lengths_ms,
    log_line,
    stamp_ns,
    step_lines,
)


def test_time_phases__end_when_their_timers_were_printed(tmp_path: Path) -> None:
    trace = import_log(tmp_path, step_lines())
    assert lengths_ms(trace) == PLAIN
    ends = trace.phases(0)["end_ns"].iloc[2::3]
    assert list(ends) == [stamp_ns(log_line(1.0 + n, "")) for n in range(5)]
    ops = trace.ops(0)
    update = ops[ops["name"] == "optimizer_step"]
    assert list(update["end_ns"]) == list(ends)
    assert set(update["end_ns"] - update["start_ns"]) == {40 * MS}
    assert list(ops["name"])[:3] == ["bwd_inner", "bwd_allreduce", "optimizer_step"]
    backward = trace.phases(0).iloc[1]
    assert ops["start_ns"].iloc[0] == backward["start_ns"]
    assert ops["end_ns"].iloc[1] <= backward["end_ns"]


def test_time_phases__places_steps_without_times_next_to_the_others(
    tmp_path: Path,
) -> None:
    lines = step_lines()
    bare = [
        text[text.index("] [Rank") + 2 :] if n < 6 or n >= 12 else text
        for n, text in enumerate(lines)
    ]
    trace = import_log(tmp_path, bare)
    assert lengths_ms(trace) == PLAIN
    starts, ends = (trace.phases(0)[name].to_numpy() for name in ("start_ns", "end_ns"))
    assert [ends[8], ends[11]] == [stamp_ns(log_line(3, "")), stamp_ns(log_line(4, ""))]
    assert ends[5] == starts[6]
    assert starts[12] == ends[11]


def stamped(log: Path, zone: str = "", seconds: float = 0.1) -> list[str]:
    """Return a log as `ts` or docker would have written it, with a constant interval
    between lines."""
    start = datetime.datetime(2026, 3, 1, 12)
    lines = log.read_text().splitlines()
    times = [start + datetime.timedelta(seconds=seconds * n) for n in range(len(lines))]
    return [
        f"{moment:%Y-%m-%dT%H:%M:%S}.{moment.microsecond:06d}{zone} {text}"
        for moment, text in zip(times, lines, strict=True)
    ]


@pytest.mark.parametrize(
    ("zone", "hours"), [("", 0.0), ("Z", 0.0), ("+05:30", 5.5), ("-0330", -3.5)]
)
def test_time_phases__use_times_that_precede_each_line(
    tmp_path: Path, zone: str, hours: float
) -> None:
    log = DATA / "deepspeed-0.19.8-zero2-accumulation.log"
    trace = import_log(tmp_path, stamped(log, zone))
    assert deepspeed_of(trace).info.config["gradient_accumulation_steps"] == 3
    lines = log.read_text().splitlines()
    printed = next(n for n, text in enumerate(lines) if "| fwd: " in text)
    first = int(
        datetime.datetime(2026, 3, 1, 12, tzinfo=datetime.UTC).timestamp() * 1e9
        - hours * 3.6e12
    )
    update = trace.phases(0)[lambda rows: rows["phase"] == "update"].iloc[0]
    marked_ns = (
        first
        + next(n for n, t in enumerate(lines[:printed]) if "Engine before step" in t)
        * MS
        * 100
    )
    assert (
        marked_ns
        <= update["start_ns"]
        <= update["end_ns"]
        <= first + printed * MS * 100
    )
    # Of these a backward ends with the mark behind it, which DeepSpeed takes within its
    # timer.
    over = [n + 1 for n, text in enumerate(lines) if "Engine after backward" in text]
    backward = trace.phases(0)[lambda rows: rows["phase"] == "backward"]
    assert list(backward["end_ns"]) == [first + n * 100 * MS for n in over]
    assert any("without a time zone" in note for note in trace.notes) == (zone == "")
    assert len(trace.memory(0)[lambda rows: rows["pool"] == "host"]) == len(
        re.findall("CPU Virtual", log.read_text())
    )


def test_update_parts__that_are_nested_stay_inside_the_timer_that_contains_them(
    tmp_path: Path,
) -> None:
    lines = [
        "time (ms) | inner: 2000.00 | scale: 50.00 | optimizer_step: 2100.00",
        "time (ms) | fwd_microstep: 300.00 | bwd_microstep: 600.00 | "
        "step_microstep: 2120.00",
        "time (ms) | fwd: 300.00 | bwd: 600.00 | step: 2120.00",
    ]
    trace = import_log(tmp_path, lines * 3)
    phases, ops = trace.phases(0), trace.ops(0)
    updates = phases[phases["phase"] == "update"].set_index("iteration")
    assert len(ops) == 9
    for _, op in ops.iterrows():
        update = updates.loc[op["iteration"]]
        assert update["start_ns"] <= op["start_ns"] < op["end_ns"] <= update["end_ns"]
    first = ops[ops["iteration"] == 0].set_index("name")
    parent = first.loc["optimizer_step"]
    children = first.loc[["inner", "scale"]]
    assert (children["start_ns"] >= parent["start_ns"]).all()
    assert (children["end_ns"] <= parent["end_ns"]).all()
    spans = sorted(zip(children["start_ns"], children["end_ns"], strict=True))
    assert spans[0][1] <= spans[1][0]


def test_update_parts__that_no_update_can_contain_are_left_out(tmp_path: Path) -> None:
    lines = [
        "time (ms) | whole_epoch: 90000.00 | optimizer_step: 2100.00",
        "time (ms) | fwd: 300.00 | bwd: 600.00 | step: 2120.00",
    ]
    trace = import_log(tmp_path, lines * 3)
    assert set(trace.ops(0)["name"]) == {"optimizer_step"}
