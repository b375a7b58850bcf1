"""Imports of logs that others published, against figures read from the text."""

from __future__ import annotations

import csv
import re
import statistics
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from ebbtide.analysis.metrics.summary import summarize
from ebbtide.analysis.metrics.windows import find_windows
from ebbtide.features.deepspeed.setup import deepspeed_of
from ebbtide.features.importers.load import import_trace
from ebbtide.features.importers.source import SourceError
from ebbtide.phases import PHASES
from ebbtide.profiler.trace import Trace
from ebbtide.profiler.trace.metadata import ClockInfo, ModelInfo, OptimizerInfo
from tests.features.deepspeed.log_importer.made_logs import GIB, MS
from tests.features.deepspeed.log_importer.published_logs import (
    MONITORED_LOGS,
    each_log,
    each_monitored_log,
    mark_times_ns,
    monitor_of,
    printed_ms,
    published,
    unix_times_ns,
    world_size,
)


@published
@each_log
def test_import_trace__medians_are_those_of_the_printed_timers(
    import_alone: Callable[[Path], Trace], log: Path
) -> None:
    printed, summary = printed_ms(log), summarize(import_alone(log))
    # One of the runs ended before its first step.
    assert (summary.iterations, summary.warmup_iterations) == (
        len(printed),
        2 if printed else 0,
    )
    assert summary.ranks == world_size(log)
    for phase in summary.phases[:3]:
        expected = (
            statistics.median(step[phase.phase] for step in printed[2:])
            if printed
            else None
        )
        assert phase.median_ms == pytest.approx(expected, abs=1e-6)
        assert phase.count == len(printed)


@published
@each_log
def test_time_phases__are_in_order_and_between_their_marks(
    import_alone: Callable[[Path], Trace], log: Path
) -> None:
    phases = import_alone(log).phases(0)
    assert list(phases["phase"]) == list(PHASES) * len(printed_ms(log))
    assert list(phases["iteration"]) == [
        n for n in range(len(printed_ms(log))) for _ in PHASES
    ]
    times = phases[["start_ns", "end_ns"]].to_numpy().ravel()
    assert (np.diff(times) >= 0).all()
    for phase, word in (
        ("forward", "forward"),
        ("backward", "backward"),
        ("update", "step"),
    ):
        rows = phases[phases["phase"] == phase]
        # A log's clock has milliseconds, and its timers were read a little before they
        # were printed.
        assert (
            rows["start_ns"].to_numpy()
            >= np.array(mark_times_ns(log, f"Engine before {word}")) - 2 * MS
        ).all()
        assert (
            rows["end_ns"].to_numpy()
            <= np.array(mark_times_ns(log, f"Engine after {word}")) + 5 * MS
        ).all()


@published
@each_monitored_log
def test_time_phases__updates_match_the_unix_times_of_the_job(
    import_alone: Callable[[Path], Trace], log: Path
) -> None:
    starts, ends = unix_times_ns(log, "step_start"), unix_times_ns(log, "step_end")
    phases = import_alone(log).phases(0)
    updates = phases[phases["phase"] == "update"]
    assert len(starts) == len(ends) == 4 * len(updates)
    for number, (start, end) in enumerate(
        zip(updates["start_ns"], updates["end_ns"], strict=True)
    ):
        step = slice(4 * number, 4 * number + 4)
        assert abs(start - min(starts[step])) < 3 * MS
        assert abs(end - max(ends[step])) < 6 * MS
    assert import_alone(log).meta.clock == ClockInfo(name="unix", wall_offset_ns=0)


@published
@each_log
def test_add_memory__has_the_values_of_the_marks(
    import_alone: Callable[[Path], Trace], log: Path
) -> None:
    trace = import_alone(log)
    peaks_gib = [
        float(gib) for gib in re.findall(r"\bMax_MA ([\d.]+) GB", log.read_text())
    ]
    assert summarize(trace).memory.pools["allocated"] == round(max(peaks_gib) * GIB)
    rows = trace.memory(0)
    used = [float(gib) for gib in re.findall(r"\bused = ([\d.]+) GB", log.read_text())]
    assert sorted(rows[rows["pool"] == "host"]["bytes"]) == sorted(
        round(gib * GIB) for gib in used
    )
    assert all(trace.memory(rank).empty for rank in range(1, world_size(log)))


@published
@each_log
def test_add_metadata__has_job_and_model(
    import_alone: Callable[[Path], Trace], log: Path
) -> None:
    trace = import_alone(log)
    zero = deepspeed_of(trace).info.config["zero_optimization"]
    named = re.search(
        r"-ratio([\d.]+)-subg(\d+)-prefetch(\d)-flush_async(\d)-opt_gaps(\d+)", log.name
    )
    assert named
    assert (zero["stage"], zero["sub_group_size"]) == (3, float(named[2]))
    assert zero["offload_optimizer"]["ratio"] == float(named[1])
    # The runs of one and two ranks have another model of the same name.
    ranks = world_size(log)
    total = {("20B", 4): 15_326_663_680, ("13B", 4): 11_315_860_480}.get(
        (log.name[4:7], ranks), 11_197_895_680
    )
    for rank in range(ranks):
        entry = trace.rank(rank)
        assert entry.model == ModelInfo(total_params=total, params=total // ranks)
        assert (entry.world_size, entry.devices[0].device) == (ranks, f"cuda:{rank}")
        assert entry.optimizers == (
            OptimizerInfo(class_name="DeepSpeedCPUAdam", params=total // ranks),
        )
        assert entry.torch
    assert trace.ranks == list(range(ranks))
    assert sum(deepspeed_of(trace).info.subgroup_params) == total // ranks
    assert deepspeed_of(trace).info.activation_checkpointing is True
    assert "pretrain_gpt.py" in " ".join(trace.meta.command)


@published
@each_monitored_log
def test_import_trace__a_monitor_adds_the_device_of_each_rank(
    import_with_monitor: Callable[[Path], Trace], log: Path
) -> None:
    trace = import_with_monitor(log)
    with open(monitor_of(log), newline="") as file:
        rows = list(csv.DictReader(file))
    for rank in trace.ranks:
        own = sorted(
            (r for r in rows if r["device_id"] == str(rank)),
            key=lambda r: int(r["timestamp"]),
        )
        log_line = trace.memory(rank)
        log_line = log_line[log_line["pool"] == "device"]
        assert list(zip(log_line["t_ns"], log_line["bytes"], strict=True)) == [
            (int(r["timestamp"]), int(r["mem_used"])) for r in own
        ]
        link = trace.link(rank)
        assert list(link["t_ns"]) == [int(r["timestamp"]) for r in own]
        assert list(link["h2d_bytes_per_s"]) == [float(r["rxpci"]) * 2**20 for r in own]
        assert list(link["d2h_bytes_per_s"]) == [float(r["txpci"]) * 2**20 for r in own]
        assert set(link["window_ns"]) == {20 * MS}
        assert set(log_line["device"]) == set(link["device"]) == {f"cuda:{rank}"}
        device = trace.rank(rank).devices[0]
        assert device.capacity_bytes == int(own[0]["mem_used"]) + int(
            own[0]["mem_free"]
        )
        assert (device.link.generation, device.link.width) == (5, 16)
        assert device.link.peak_bytes_per_s == pytest.approx(63.015e9, rel=1e-4)
        pd.testing.assert_frame_equal(trace.phases(rank), trace.phases(0))
    assert summarize(trace).iterations == len(printed_ms(log))
    windows = find_windows(trace, GIB, [1])
    assert windows.windows
    assert all(
        w.h2d_idle_share is not None and w.d2h_idle_share is not None
        for w in windows.windows
    )
    assert next(note for note in trace.notes if "rank 0 only" in note).endswith(
        "get the same phases"
    )


@pytest.mark.slow
@published
def test_clock_offset__refuses_a_monitor_of_another_run(tmp_path: Path) -> None:
    log, other = MONITORED_LOGS[:2]
    with pytest.raises(SourceError, match=r"^.*share no time.*$"):
        import_trace([log, monitor_of(other)], tmp_path / "x.ebb")
    assert not (tmp_path / "x.ebb").exists()
