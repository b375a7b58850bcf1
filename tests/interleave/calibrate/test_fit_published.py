"""What is fitted on a few published runs holds on the others; and where the presets come from."""

from __future__ import annotations

import pytest

from ebbtide.analysis.metrics.summary import summarize
from ebbtide.interleave.calibrate.fitting.fit import fit, sample_of
from ebbtide.interleave.calibrate.fitting.from_traces import machine_of
from ebbtide.interleave.policies import make_plan
from ebbtide.interleave.simulation.simulator import simulate
from ebbtide.machines.catalog import preset, presets
from ebbtide.profiler.trace import Trace
from tests.interleave.published import PRESETS, runs

Runs = dict[str, dict[str, Trace]]


@pytest.fixture(scope="module")
def published() -> Runs:
    return {name: runs(name) for name in PRESETS}


@pytest.mark.parametrize(
    ("machine", "fitted"),
    [
        ("h100-80gb-sxm-published", {"h100-20b-ratio0.5-async", "h100-20b-async", "h100-20b-interleaved-2"}),
        ("a100-40gb-published", {"a100-13b-async", "a100-13b-interleaved-2", "a100-13b-interleaved-10"}),
    ],
)
def test_three_runs_predict_the_others(published: Runs, machine: str, fitted: set[str]) -> None:
    traces = published[machine]
    box = fit([sample_of(traces[name]) for name in sorted(fitted)]).machine
    updates, iterations = {}, {}
    for name in traces.keys() - fitted:
        sample = sample_of(traces[name])
        schedule = simulate(make_plan(sample.policy, sample.workload, box), sample.workload, box)
        updates[name] = abs(schedule.update_s / sample.update_s - 1)
        measured_ms = summarize(traces[name]).iteration_ms
        assert measured_ms is not None
        iterations[name] = abs(schedule.iteration_s * 1e3 / measured_ms - 1)
    assert len(updates) == len(traces) - len(fitted) >= 3
    assert sum(updates.values()) / len(updates) <= 0.05, updates
    assert max(updates.values()) <= 0.10, updates
    assert max(iterations.values()) <= 0.08, iterations


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_what_all_its_runs_give(published: Runs, name: str) -> None:
    shipped = preset(name).as_json()
    found = machine_of([trace.path for trace in published[name].values()], name).as_json()
    assert set(shipped) - set(found) == {"source"}
    for key, value in found.items():
        if isinstance(value, float):
            assert shipped[key] == pytest.approx(value, rel=0.02), key
    assert shipped["fit"]["policies"] == found["fit"]["policies"]
    assert shipped["fit"]["residuals"] == pytest.approx(found["fit"]["residuals"], abs=2e-3)
    assert shipped["fit"]["unidentified"] == found["fit"]["unidentified"]


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_says_where_it_is_from_and_what_it_does_not_know(name: str) -> None:
    assert name in presets()
    machine = preset(name)
    assert machine.name == name
    assert {"data", "how", "date"} <= set(machine.more["source"])
    fitted = machine.more["fit"]
    assert max(map(abs, fitted["residuals"].values())) < 0.03
    # What the runs do not tell is there all the same, and named.
    assert all(getattr(machine, key) is not None for key in fitted["unidentified"])
    assert "d2h_pageable_bytes_per_s" in fitted["unidentified"]
    assert set(fitted["unidentified"]) < set(fitted["uncertainty"])
