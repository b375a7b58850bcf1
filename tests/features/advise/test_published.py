"""Plans of the published jobs, restricted to the policies that were measured: their
order, and their ranges."""

from __future__ import annotations

from itertools import combinations

import pytest

from ebbtide.analysis.metrics.summary import summarize
from ebbtide.features.advise.job.sources import BatchSettings, job_of_trace
from ebbtide.features.advise.machine_plan import PlanRequest, plan_for_machine
from ebbtide.interleave.policies import as_policies
from ebbtide.interleave.replay.recorded_job import recorded_policy
from ebbtide.machines.catalog import preset
from ebbtide.profiler.trace import open_trace
from tests.conftest import slow
from tests.interleave.published import PRESETS, TRACES

TIE = 0.05


@pytest.mark.parametrize("name", slow(list(PRESETS), but=["a100-40gb-published"]))
def test_plan__of_one_run_has_the_order_of_all_measured_policies(name: str) -> None:
    """Rates are fitted to these runs; forward and backward are those of one of them.
    benchmarks/ leaves runs out."""
    machine = preset(name)
    job = job_of_trace(
        open_trace(TRACES / f"{PRESETS[name]}-async.ebb"), BatchSettings()
    )
    times, holding = [], 0
    for path in sorted(TRACES.glob(f"{PRESETS[name]}*.ebb")):
        trace = open_trace(path)
        measured, policy = summarize(trace).iteration_ms, recorded_policy(trace)
        assert measured is not None
        assert policy is not None
        plan = plan_for_machine(
            job, machine, PlanRequest(policies=as_policies((policy,)))
        )
        assert (plan.fits, plan.policy) == (True, policy)
        span = plan.iteration
        assert span is not None
        assert span.likely / 1.2 <= span.low
        assert span.high <= span.likely * 1.2
        times.append((measured, span.likely))
        holding += span.low <= measured <= span.high
    assert holding >= 0.8 * len(times)
    for (measured, predicted), (other_measured, other_predicted) in combinations(
        times, 2
    ):
        if max(measured, other_measured) > (1 + TIE) * min(measured, other_measured):
            assert (measured > other_measured) == (predicted > other_predicted)
