"""`ebbtide.metrics`: a recorded job's own figures are those of its trace."""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import dedent

import pytest

import ebbtide
from ebbtide.analysis.metrics.iterations import durations_ms, intervals
from ebbtide.analysis.metrics.phases import phase_bytes, phase_peaks
from ebbtide.features.live.agent.iteration_figures import IterationTimes
from ebbtide.features.live.recording.sampled_figures import open_samples
from ebbtide.phases import ITERATION_PARTS
from ebbtide.profiler.agent.spool import RECORD
from ebbtide.profiler.trace import open_trace
from tests.features.live.recording.growing import GrowingRecording
from tests.profiler.agent.jobs import PRELUDE
from tests.profiler.agent.timed_jobs import Record

# A GAN whose generator accumulates: the second update extends the iteration that the
# first one has ended. The pauses are long enough for memory to be read at the ends of
# all phases.
JOB = """
import json, time, ebbtide
critic = nn.Linear(4, 1)
second = PlainSGD(critic.parameters(), lr=1e-2)
rows = [ebbtide.metrics()]
for _ in range(STEPS):
    time.sleep(0.02)
    x, y = batch()
    with torch.no_grad():
        fake = model(x)
    (critic(y).mean() - critic(fake).mean()).backward()
    second.step()
    rows.append(ebbtide.metrics())
    for _ in range(2):
        time.sleep(0.02)
        (-critic(model(x)).mean()).backward()
    optimizer.step()
    rows.append(ebbtide.metrics())
json.dump(rows, open("rows.json", "w"))
"""


def test_metrics__are_those_of_the_trace_and_follow_the_iterations(
    record: Record,
) -> None:
    recorded = record(PRELUDE + dedent(JOB))
    assert recorded.run.returncode == 0, recorded.run.stderr
    trace = recorded.trace
    before, *rows = json.loads(recorded.path.with_name("rows.json").read_text())
    assert before == {}
    assert [row["ebbtide/iteration"] for row in rows] == [0, 0, 1, 1, 2, 2, 3, 3]
    seconds = durations_ms(intervals(trace, 0)).frame / 1e3
    peaks = phase_peaks(trace, 0, "heap").frame.max(axis=1)
    for row in rows[1::2]:
        number = row["ebbtide/iteration"]
        expected = {
            f"ebbtide/phase_seconds/{part}": seconds.loc[number, part]
            for part in ITERATION_PARTS
        }
        assert {key: row[key] for key in expected} == pytest.approx(expected, abs=1e-9)
        assert row["ebbtide/iteration_seconds"] == pytest.approx(
            seconds.loc[number, "iteration"], abs=1e-9
        )
        assert row["ebbtide/peak_bytes/heap"] == peaks[number]
        assert row["ebbtide/capacity_bytes"] == trace.rank(0).main_device.capacity_bytes
        assert (
            row["ebbtide/free_bytes"] == row["ebbtide/capacity_bytes"] - peaks[number]
        )


def test_metrics__are_empty_where_nothing_is_recorded() -> None:
    assert ebbtide.metrics() == {}


def test_sampled_figures__are_those_of_the_newest_iteration_that_was_sampled(
    tmp_path: Path,
) -> None:
    recording = GrowingRecording(tmp_path / "run.ebb")
    recording.begin()
    recording.add_rank(1, 20)
    sampler = recording.add_sampler(900)
    recording.grow_to(1.0)
    trace = open_trace(recording.path)
    iterations = [
        IterationTimes(row.iteration, row.start_ns, row.end_ns, ())
        for row in intervals(trace, 1).spans.itertuples()
    ]
    moved = {
        direction: phase_bytes(trace, 1, direction).frame.sum(axis=1)
        for direction in ("h2d", "d2h")
    }
    peaks = phase_peaks(trace, 1, "device").frame.max(axis=1)
    content = recording.spools[sampler]
    sampler.unlink()
    gpus = [{"index": index, "uuid": f"GPU-{index}"} for index in range(2)]
    assert open_samples(sampler.parent, {"uuid": "GPU-1"}, gpus) is None
    recording.grow(sampler, 0)
    samples = open_samples(sampler.parent, {"uuid": "GPU-1"}, gpus)
    assert samples is not None
    assert samples.read(reversed(iterations)) == {}
    for share in (0.3, 0.5, 1.0):
        recording.grow(sampler, round(share * len(content)))
        written = content[: sampler.stat().st_size // RECORD.size * RECORD.size]
        until_ns = max(record[-3] for record in RECORD.iter_unpack(written))
        number = max(times.number for times in iterations if times.end_ns <= until_ns)
        assert samples.read(reversed(iterations)) == {
            "peak_bytes/device": peaks[number],
            "link_bytes/h2d": pytest.approx(moved["h2d"][number], rel=1e-6),
            "link_bytes/d2h": pytest.approx(moved["d2h"][number], rel=1e-6),
        }
