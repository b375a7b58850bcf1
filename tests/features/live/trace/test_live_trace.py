"""Tests of `LiveTrace`: figures of a growing recording against those of the finished
trace."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from ebbtide.analysis.metrics.gpu_state import gpu_state
from ebbtide.analysis.metrics.iteration_stats import compare_iterations
from ebbtide.analysis.metrics.link import link_use
from ebbtide.analysis.metrics.summary import summarize
from ebbtide.errors import TraceError
from ebbtide.features.live.trace import LiveTrace
from ebbtide.features.live.trace.live_trace import last_iterations
from ebbtide.profiler.agent.spool import RECORD
from ebbtide.profiler.recording.lifecycle import finish
from ebbtide.profiler.trace import open_trace
from tests.conftest import examples
from tests.features.live.recording.growing import (
    BACKWARD_MS,
    CAPACITY,
    FORWARD_MS,
    OTHER_MS,
    PEAK,
    UPDATE_MS,
    GrowingRecording,
)

ITERATIONS = 60
STEP_MS = FORWARD_MS + BACKWARD_MS + UPDATE_MS + OTHER_MS


@pytest.fixture
def recording(tmp_path: Path) -> GrowingRecording:
    recording = GrowingRecording(tmp_path / "run.ebb")
    recording.begin()
    recording.add_rank(0, ITERATIONS, slow_ms=9)
    recording.add_rank(1, ITERATIONS, slow_ms=3)
    recording.add_sampler(ITERATIONS * (STEP_MS + 1))
    return recording


def follow(recording: GrowingRecording, iterations: int, pieces: int = 6) -> LiveTrace:
    """Follow a recording that grows to its end in pieces that cut records."""
    live = LiveTrace(recording.path, iterations)
    for number in range(1, pieces + 1):
        recording.grow_to(number / pieces)
        live.poll()
    return live


def test_live_trace__has_the_figures_of_the_finished_trace_at_the_end(
    recording: GrowingRecording,
) -> None:
    live = follow(recording, 2 * ITERATIONS)
    assert live.trace is not None
    running = summarize(live.trace).as_json()
    totals = {rank: live.totals(rank) for rank in live.ranks}
    finish(recording.path, {})
    finished = summarize(open_trace(recording.path)).as_json()
    assert finished["iterations"] == ITERATIONS
    assert {**running, "remarks": None} == {**finished, "remarks": None}
    assert live.poll()
    assert live.state == "complete"
    for rank, counted in totals.items():
        of_tables = live.totals(rank)
        assert counted.iterations == of_tables.iterations == ITERATIONS
        assert counted.phase_iterations == of_tables.phase_iterations
        assert counted.phase_s == pytest.approx(of_tables.phase_s)
        assert counted.link_bytes == pytest.approx(of_tables.link_bytes, rel=1e-6)


def test_live_trace__keeps_the_last_iterations_with_their_figures(
    recording: GrowingRecording,
) -> None:
    count = 12
    live = follow(recording, count)
    assert live.trace is not None
    window = live.trace
    finish(recording.path, {})
    whole = open_trace(recording.path)
    expected = last_iterations(whole, count)
    rows, all_rows = (
        compare_iterations(trace).to_pandas() for trace in (window, whole)
    )
    last = (
        all_rows[all_rows["iteration"] >= ITERATIONS - count]
        .assign(warmup=False)
        .reset_index(drop=True)
    )
    steady = rows[~rows["warmup"]].reset_index(drop=True)
    pd.testing.assert_frame_equal(steady, last)
    assert len(rows) == 2 * (count + 1)
    for figures in (
        lambda t: summarize(t).phases,
        lambda t: link_use(t).phases,
        lambda t: gpu_state(t).figures,
    ):
        assert figures(window) == figures(expected)
    # What was dropped still counts in the totals.
    live.poll()
    assert all(live.totals(rank).iterations == ITERATIONS for rank in window.ranks)


def test_live_trace__figures_of_a_rank_are_those_of_the_recording(
    recording: GrowingRecording,
) -> None:
    rank = follow(recording, 20).rank(1)
    assert (rank.device, rank.device_name, rank.iteration, rank.state) == (
        "cuda:0",
        "G",
        ITERATIONS - 1,
        "stopped",
    )
    parts = {
        "forward": FORWARD_MS,
        "backward": BACKWARD_MS,
        "update": UPDATE_MS,
        "other": OTHER_MS,
    }
    assert rank.median_ms == pytest.approx({**parts, "iteration": STEP_MS})
    assert rank.memory is not None
    assert (rank.memory.pool, rank.memory.capacity_bytes) == ("device", CAPACITY)
    assert rank.memory.free_bytes == CAPACITY - rank.memory.bytes
    assert set(rank.memory.peak_bytes) == set(parts)
    assert rank.link["h2d"].share == pytest.approx(rank.link["h2d"].bytes_per_s / PEAK)
    assert rank.link["d2h"].bytes_per_s == 2 * rank.link["h2d"].bytes_per_s
    assert set(rank.gpu) == {"utilization_percent"}


@pytest.mark.parametrize("seed", range(examples(4, by_default=1)))
def test_live_trace__never_loses_or_invents_an_iteration_wherever_spools_are_cut(
    recording: GrowingRecording, seed: int
) -> None:
    chance = random.Random(seed)
    live = LiveTrace(recording.path, 5)
    iterations = dict.fromkeys((0, 1), 0)
    sizes = dict.fromkeys(recording.spools, 0)
    while any(size < len(recording.spools[path]) for path, size in sizes.items()):
        path = chance.choice(list(sizes))
        sizes[path] += chance.randrange(1, 600 * RECORD.size)
        recording.grow(path, sizes[path])
        live.poll()
        for rank in live.ranks:
            totals = live.totals(rank)
            # A time that arrives late, or that the device has measured, never takes
            # back what was counted.
            assert totals.iterations >= iterations[rank]
            iterations[rank] = totals.iterations
            figures = live.rank(rank)
            assert figures.iteration in (None, totals.iterations - 1)
            assert (
                "iteration" not in figures.last_ms
                or figures.last_ms["iteration"] >= STEP_MS - OTHER_MS
            )
    assert iterations == {0: ITERATIONS, 1: ITERATIONS}


def test_live_trace__waits_for_a_folder_and_for_ranks_that_begin_late(
    tmp_path: Path,
) -> None:
    recording = GrowingRecording(tmp_path / "late.ebb")
    live = LiveTrace(recording.path)
    assert (live.poll(), live.state, live.ranks) == (False, "waiting", [])
    recording.path.mkdir()
    assert (live.poll(), live.state) == (False, "waiting")
    recording.path.rmdir()
    recording.begin()
    recording.add_rank(0, 3)
    recording.grow_to(1)
    assert live.poll()
    assert live.ranks == [0]
    recording.add_rank(1, 3)
    recording.grow_to(1)
    assert live.poll()
    assert live.ranks == [0, 1]
    assert not live.poll()


def test_live_trace__tells_a_process_that_ended_without_a_word(
    recording: GrowingRecording,
) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"],
        capture_output=True,
        check=True,
    )
    path = next(iter(recording.spools))
    renamed = path.with_name(
        path.name.replace(str(os.getpid()), ended.stdout.decode().strip())
    )
    renamed.write_bytes(recording.spools[path][: 300 * RECORD.size + 7])
    live = LiveTrace(recording.path)
    live.poll()
    assert live.rank(0).state == "ended"
    assert live.state == "cut off"


def test_live_trace__refuses_what_is_no_trace_and_notices_a_removed_one(
    tmp_path: Path, recording: GrowingRecording
) -> None:
    (tmp_path / "notes.txt").write_text("x")
    for path in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(TraceError, match="is not a trace"):
            LiveTrace(path).poll()
    recording.grow_to(0.5)
    live = LiveTrace(recording.path)
    live.poll()
    recording.path.rename(tmp_path / "elsewhere")
    assert live.poll()
    assert live.state == "gone"
