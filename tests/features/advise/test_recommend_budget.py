"""The engine accepts the recommended memory budget, and makes the plan that was
simulated."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from ebbtide.features.advise.lines.setups import memory_budget
from ebbtide.interleave.engine.adaptive.planner import Planner
from ebbtide.interleave.engine.runtime.layout import Subgroup
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies import as_policy
from tests.features.advise.test_ablation import ran
from tests.interleave.job_files import machine, workload

# Two subgroups pass through 2.4 GB.
gigabytes = (st.floats(0, 4) | st.floats(0, 40)).map(lambda size: size * 1e9)
starts = st.sampled_from([0.1, 0.2, 0.5, 0.8])


def planner(policy: str, job: Workload) -> Planner:
    """Return the planner of an engine with the subgroups of a workload."""
    dtype = torch.bfloat16
    subgroups = [Subgroup(size, dtype, (), dtype) for size in job.subgroups]
    return Planner(
        as_policy(policy),
        machine(),
        subgroups,
        "kept" if job.gradients_held_until_step else "streamed",
    )


@given(
    policy=st.sampled_from(
        ["pipelined", *(f"interleaved:{stride}" for stride in range(1, 11))]
    ),
    free=st.dictionaries(starts, gigabytes, max_size=3),
    first=gigabytes,
    stay=st.booleans(),
)
def test_memory_budget__is_accepted_and_gives_the_simulated_plan(
    policy: str, free: dict[float, float], first: float, stay: bool
) -> None:
    steps = [
        {"at_s": 0, "bytes": first},
        *({"at_s": at_s, "bytes": size} for at_s, size in sorted(free.items())),
    ]
    job = workload(gpu_free_bytes=steps, gradients_stay=stay)
    schedule = ran(policy, job, machine())
    assume(schedule.fits_device(None))
    plan = planner(policy, job).plan(memory_budget(schedule))
    assert plan.resident == schedule.plan.resident
    assert plan.kept_gradients == schedule.plan.kept_gradients
    assert plan.counts() == schedule.plan.counts()


def test_memory_budget__of_adaptive_has_what_each_phase_leaves_free() -> None:
    job = workload()
    budget = memory_budget(ran("adaptive", job, machine()))
    assert budget == {
        "forward": 20_000_000_000,
        "backward": 6_000_000_000,
        "update": 30_000_000_000,
    }
    assert planner("adaptive", job).plan(budget).ops


@pytest.mark.parametrize(
    ("policy", "free"), [("pipelined", 6e9), ("interleaved:2", None)]
)
def test_memory_budget__is_none_without_use_or_knowledge_of_memory(
    policy: str, free: float | None
) -> None:
    assert memory_budget(ran(policy, workload(gpu_free_bytes=free), machine())) is None
