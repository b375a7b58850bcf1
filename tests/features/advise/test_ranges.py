"""Ranges of iterations."""

from __future__ import annotations

import pytest

from ebbtide.features.advise.ranges import policy_time, residual_factor
from ebbtide.interleave.simulation.simulator import Steps
from tests.features.advise.test_ablation import ran
from tests.interleave.job_files import machine, workload


def width(
    policy: str, compute_factor: float = 1.0, **extra: object
) -> tuple[float, float]:
    """Return the iteration over the low end, and the high end over the iteration."""
    target = machine(**extra)
    schedule = ran(policy, workload(), target)
    span = policy_time(Steps(schedule), target, compute_factor)
    assert span.ms.likely == 1e3 * schedule.iteration_s
    return (
        span.ms.likely / span.ms.low,
        span.ms.high / span.ms.likely,
    )


def test_policy_time__grows_with_each_uncertainty() -> None:
    certain = width("zero-offload")
    cpu = width("zero-offload", uncertainty={"cpu_update_params_per_s": 1.3})
    both = width("zero-offload", 1.2, uncertainty={"cpu_update_params_per_s": 1.3})
    assert list(certain) == pytest.approx([1.02**1.2816] * 2)
    assert certain < cpu < both


def test_policy_time__a_rate_that_limits_nothing_adds_nothing() -> None:
    assert width(
        "gpu-only", uncertainty={"cpu_update_params_per_s": 3.0}
    ) == pytest.approx(width("gpu-only"))


def test_policy_time__a_job_of_compute_alone_has_the_range_of_its_compute() -> None:
    target, job = (
        machine(),
        workload(
            params=1_000_000, subgroup_params=1_000_000, forward_s=1.0, backward_s=2.0
        ),
    )
    span = policy_time(Steps(ran("gpu-only", job, target)), target, 1.2)
    # Both errors: a logarithm of 0.182 of the compute and 0.020 of the model.
    assert span.ms.high / span.ms.likely == pytest.approx(1.265, rel=0.01)


def test_residual_factor__is_that_of_runs_with_the_same_operations() -> None:
    about = {"policies": {"a": "twin-flow:0.5,grads=async"}, "residuals": {"a": 0.05}}
    target = machine(fit={**about, "uncertainty": {"cpu_cast_params_per_s": 3.0}})
    assert residual_factor("zero-offload", target) == pytest.approx(1.05)
    assert residual_factor("zero-offload,grads=blocking", target) is None
    assert residual_factor("adaptive", target) is None
    blocking = machine(fit={**about, "policies": {"a": "zero-offload,grads=blocking"}})
    assert residual_factor("twin-flow:0.5", blocking) == pytest.approx(1.05)
    assert residual_factor("zero-offload", machine()) is None
    assert (
        residual_factor("zero-offload", machine(fit={"policies": 3, "residuals": []}))
        is None
    )


def test_policy_time__of_a_fitted_policy_does_not_depend_on_single_rates() -> None:
    fit = {
        "policies": {"a": "zero-offload"},
        "residuals": {"a": 0.01},
        "uncertainty": {"cpu_cast_params_per_s": 3.0},
    }
    fitted, other = (
        width("zero-offload", fit=fit),
        width("zero-offload", fit={**fit, "policies": {"a": "adaptive"}}),
    )
    assert fitted[1] < 1.04 < other[1]
