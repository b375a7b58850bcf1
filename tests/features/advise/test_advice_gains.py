"""No advice is slower than the job it is given for, repeats its setting, or does not
fit.

`benchmarks/advice.py` runs these checks on all traces, 12 machines and 300 random
workloads."""

from __future__ import annotations

import pytest

from ebbtide.analysis.metrics.advice import IterationGain
from ebbtide.features.advise.recommendation import recommend
from ebbtide.interleave.replay.recorded_job import RecordedJob
from ebbtide.machines.catalog import preset
from ebbtide.profiler.trace import open_trace
from tests.conftest import examples, seeded, slow_case
from tests.features.advise import advice_checks as checks
from tests.interleave.job_files import machine, workload
from tests.interleave.published import TRACES

A100 = "a100-40gb-published"


@pytest.mark.parametrize(
    ("name", "machine_name"),
    [
        slow_case("a100-13b-async", "h200"),
        slow_case("h100-20b-ratio0.5-blocking", A100),
        # Its memory is 1.5 % less than the trace has recorded of the same GPU.
        ("a100-13b-interleaved-2", "a100-40gb-pcie"),
        # Another GPU with the same memory, whose times differ.
        slow_case("h100-20b-async", "h100-80gb-pcie"),
    ],
)
def test_advice__gains_and_is_the_same_in_replay_and_plan(
    name: str, machine_name: str
) -> None:
    trace = open_trace(TRACES / f"{name}.ebb")
    assert (
        checks.check_findings(trace) + checks.check_trace(trace, preset(machine_name))
        >= 2
    )


@pytest.mark.parametrize("seed", range(examples(20, by_default=2)))
def test_advice__gains_on_random_workloads(seed: int) -> None:
    with seeded(seed) as random:
        checks.check_workload(random)


def without_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(IterationGain, "is_enough", True)


@pytest.mark.parametrize("factor", [None, slow_case(0.96)])
def test_checks__find_a_loss_where_the_rule_is_taken_out(
    factor: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that has the best policy, or whose recorded iteration is shorter than the
    simulated one of any other."""
    best = recommend(workload(), machine()).setups[0]
    recorded_s = best.iteration_ms / 1e3 * factor if factor is not None else None
    policy = best.policy if factor is None else "zero-offload"
    case = checks.Case(
        workload(),
        machine(),
        RecordedJob(policy=policy, iteration_s=recorded_s, machine="box"),
    )
    assert checks.check_recommendation(recommend(*case), case) == 0
    without_rule(monkeypatch)
    with pytest.raises(AssertionError):
        checks.check_recommendation(recommend(*case), case)
