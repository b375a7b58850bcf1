"""`ebbtide.metrics`: a recorded job's own figures are those of its trace."""

from __future__ import annotations

import json
from textwrap import dedent

import pytest

import ebbtide
from ebbtide.analysis.metrics.iterations import durations_ms, intervals
from ebbtide.analysis.metrics.phases import phase_peaks
from ebbtide.phases import ITERATION_PARTS
from tests.profiler.agent.jobs import PRELUDE
from tests.profiler.agent.timed_jobs import Record

# A GAN whose generator accumulates: the second update extends the iteration that the first one has ended. The pauses
# are long enough for memory to be read at the ends of all phases.
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


def test_metrics__are_those_of_the_trace_and_follow_the_iterations(record: Record) -> None:
    recorded = record(PRELUDE + dedent(JOB))
    assert recorded.run.returncode == 0, recorded.run.stderr
    trace = recorded.trace
    before, *rows = json.loads(recorded.path.with_name("rows.json").read_text())
    assert before == {}
    assert [row["ebbtide/iteration"] for row in rows] == [0, 0, 1, 1, 2, 2, 3, 3]
    seconds = durations_ms(intervals(trace, 0)) / 1e3
    peaks = phase_peaks(trace, 0, "heap").max(axis=1)
    for row in rows[1::2]:
        number = row["ebbtide/iteration"]
        expected = {f"ebbtide/phase_seconds/{part}": seconds.loc[number, part] for part in ITERATION_PARTS}
        assert {key: row[key] for key in expected} == pytest.approx(expected, abs=1e-9)
        assert row["ebbtide/iteration_seconds"] == pytest.approx(seconds.loc[number, "iteration"], abs=1e-9)
        assert row["ebbtide/peak_bytes/heap"] == peaks[number]


def test_metrics__are_empty_where_nothing_is_recorded() -> None:
    assert ebbtide.metrics() == {}
