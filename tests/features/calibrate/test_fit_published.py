"""Tests of fits to published runs: a few of them predict the others, and all of them
give the presets."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ebbtide.analysis.metrics.summary import summarize
from ebbtide.features.calibrate.fitting.from_traces import fit, machine_of
from ebbtide.features.calibrate.fitting.samples import sample_of
from ebbtide.interleave.policies import make_plan
from ebbtide.interleave.simulation.simulator import simulate
from ebbtide.machines.catalog import preset, presets
from ebbtide.profiler.trace import Trace, open_trace
from tests.conftest import slow
from tests.interleave.published import PRESETS, TRACES, runs

Runs = dict[str, dict[str, Trace]]
BLOCKING_RATE = "d2h_pageable_bytes_per_s"


@pytest.fixture(scope="module")
def published() -> Runs:
    return {name: runs(name) for name in PRESETS}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("machine", "fitted"),
    [
        (
            "h100-80gb-sxm-published",
            {"h100-20b-ratio0.5-async", "h100-20b-async", "h100-20b-interleaved-2"},
        ),
        (
            "a100-40gb-published",
            {"a100-13b-async", "a100-13b-interleaved-2", "a100-13b-interleaved-10"},
        ),
    ],
)
def test_fit__of_three_runs_predicts_the_others(
    published: Runs, machine: str, fitted: set[str]
) -> None:
    traces = published[machine]
    fitted_machine = fit([sample_of(traces[name]) for name in sorted(fitted)]).machine
    updates, iterations = {}, {}
    for name in traces.keys() - fitted:
        sample = sample_of(traces[name])
        schedule = simulate(
            make_plan(sample.policy, sample.workload, fitted_machine),
            sample.workload,
            fitted_machine,
        )
        updates[name] = abs(schedule.update_s / sample.update_s - 1)
        measured_ms = summarize(traces[name]).iteration_ms
        assert measured_ms is not None
        iterations[name] = abs(schedule.iteration_s * 1e3 / measured_ms - 1)
    assert len(updates) == len(traces) - len(fitted) >= 3
    assert sum(updates.values()) / len(updates) <= 0.05, updates
    assert max(updates.values()) <= 0.10, updates
    assert max(iterations.values()) <= 0.08, iterations


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_presets__equal_the_fit_of_all_their_runs(published: Runs, name: str) -> None:
    shipped = preset(name).as_json()
    fitted = machine_of(
        [trace.path for trace in published[name].values()], name
    ).as_json()
    assert set(shipped) - set(fitted) == {"source", "host", "gpu_link"}
    for key, value in fitted.items():
        if isinstance(value, float) and key != BLOCKING_RATE:
            assert shipped[key] == pytest.approx(value, rel=0.02), key
    for key in ("policies", "residuals"):
        asynchronous = {
            run: entry
            for run, entry in shipped["fit"][key].items()
            if run in published[name]
        }
        expected = fitted["fit"][key]
        assert asynchronous == (
            expected if key == "policies" else pytest.approx(expected, abs=2e-3)
        )
    assert {*shipped["fit"]["unidentified"], BLOCKING_RATE} == set(
        fitted["fit"]["unidentified"]
    )


@pytest.mark.parametrize("name", slow(PRESETS, but=("a100-40gb-published",)))
def test_presets__rate_of_blocking_copies_is_fitted_to_the_blocking_runs(
    name: str,
) -> None:
    """All other rates are those of the preset, and the compute of the backward is that
    of the asynchronous run."""
    machine = preset(name)
    samples = []
    for path in sorted(TRACES.glob(f"{PRESETS[name]}*-blocking.ebb")):
        workload = sample_of(
            open_trace(TRACES / path.name.replace("-blocking", "-async"))
        ).workload
        samples.append(replace(sample_of(open_trace(path)), workload=workload))
    result = fit(samples, replace(machine, d2h_pageable_bytes_per_s=None))
    assert machine.d2h_pageable_bytes_per_s == pytest.approx(
        result.machine.d2h_pageable_bytes_per_s, rel=0.01
    )
    about = machine.extra["fit"]
    assert about["uncertainty"][BLOCKING_RATE] == pytest.approx(
        result.uncertainty[BLOCKING_RATE], abs=2e-3
    )
    residuals = {sample.name: about["residuals"][sample.name] for sample in samples}
    assert residuals == pytest.approx(result.residuals, abs=2e-3)


@pytest.mark.parametrize(
    ("name", "least_s", "most_s"),
    [("a100-40gb-published", 0.03, 0.07), ("h100-80gb-sxm-published", 0.02, 0.04)],
)
def test_presets__overhead_of_a_step_is_that_of_their_logs(
    published: Runs, name: str, least_s: float, most_s: float
) -> None:
    """It is the step less DeepSpeed's loop over subgroups, whatever the model; a fit
    once found 0.118 s."""
    overheads = [
        sample_of(trace).overhead_s or 0.0
        for trace in list(published[name].values())[:2]
    ]
    assert all(least_s / 2 < overhead < 3 * most_s for overhead in overheads)
    assert least_s < (preset(name).step_overhead_s or 0.0) < most_s


@pytest.mark.parametrize("name", PRESETS)
def test_presets__state_their_source_and_unidentified_rates(name: str) -> None:
    assert name in presets()
    machine = preset(name)
    assert machine.name == name
    assert {"data", "how", "date"} <= set(machine.extra["source"])
    fitted = machine.extra["fit"]
    assert max(map(abs, fitted["residuals"].values())) < 0.03
    # Rates that the runs do not determine have values too, and are listed.
    assert all(getattr(machine, key) is not None for key in fitted["unidentified"])
    assert set(fitted["unidentified"]) < set(fitted["uncertainty"])
