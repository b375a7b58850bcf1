"""Tests of state in storage: plans of random jobs, the checks of plans, and the bound."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.interleave.model.host_memory import needed_host_bytes
from ebbtide.interleave.model.overlap import OVERLAPS
from ebbtide.interleave.model.plan import Plan
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies import make_plan
from ebbtide.interleave.policies.registry import plan_in_memory
from ebbtide.interleave.policies.storage import LAYOUTS, stored_in
from ebbtide.interleave.simulation.bound import bound
from ebbtide.interleave.simulation.simulator import simulate
from ebbtide.interleave.simulation.steps import simulate_steps
from ebbtide.machines.machine import Machine
from ebbtide.machines.storage import StoragePath
from tests.conftest import examples
from tests.interleave.strategies import fixed_policies, machines, spread, workloads

GB = 1e9
# Ten subgroups of 1.2 GB of state, that pass through a CPU in 0.1 s each and through storage in 0.4 s.
MACHINE = Machine(
    name="desktop",
    host_memory_bytes=64 * GB,
    h2d_bytes_per_s=20 * GB,
    d2h_bytes_per_s=20 * GB,
    host_memory_bytes_per_s=1e12,
    cpu_update_params_per_s=1 * GB,
    gpu_update_params_per_s=20 * GB,
    storage=(StoragePath(3 * GB, 3 * GB),),
)
JOB = Workload("job", 10**9, 10**8, forward_s=1.0, backward_s=2.0, gpu_free=((0.0, 0.0),))
# All gradients and parameters have buffers of 4 GB.
COPIES = 4 * GB


def with_host(host_bytes: float, **values: object) -> Workload:
    return replace(JOB, host_free_bytes=host_bytes, **values)


@st.composite
def paths(draw: st.DrawFn) -> StoragePath:
    read, write = draw(spread(0.3e9, 60e9)), draw(spread(0.3e9, 60e9))
    both = draw(st.none() | st.floats(0.6, 1.0).map(lambda share: share * (read + write)))
    return StoragePath(read, write, None, both)


@st.composite
def jobs(draw: st.DrawFn, max_subgroups: int = 10) -> tuple[Workload, Machine, str]:
    """Draw a job whose state host memory holds in part, a machine with storage, and a policy."""
    workload = draw(workloads(max_subgroups=max_subgroups))
    machine = replace(draw(machines()), storage=tuple(draw(st.lists(paths(), min_size=1, max_size=3))))
    # Copies and two buffers at least, in most cases.
    copies = workload.params * (workload.grad_bytes + workload.param_bytes)
    least = copies + 2 * workload.state_bytes * max(workload.subgroups)
    everything = max(least, copies + workload.params * workload.state_bytes)
    host_bytes = draw(st.floats(least, everything) | st.just(0.5 * least))
    if draw(st.booleans()):
        workload = replace(workload, gpu_free=((0.0, 2 * everything),))
    policy = draw(
        fixed_policies()
        | st.tuples(
            st.sampled_from(["pipelined", "interleaved:2", "interleaved:3@0.6"]), st.sampled_from([*OVERLAPS])
        ).map(lambda both: f"{both[0]},overlap={both[1]}")
    )
    return replace(workload, host_free_bytes=host_bytes), machine, policy


def assert_state_is_in_memory_when_used(plan: Plan, workload: Workload, machine: Machine) -> None:
    """Follow the times of a schedule, and those of the next iteration after it."""
    schedule = simulate(plan, workload, machine)
    times: dict[int, dict[str, tuple[float, float]]] = {}
    for op, start, end in schedule.items():
        if op.subgroup in plan.stored:
            times.setdefault(op.subgroup, {})[op.kind] = (start, end)
    slack_s = 1e-9 * (schedule.iteration_s + 1)
    in_buffer: dict[int, list[tuple[float, float]]] = {}
    for op in plan.ops:
        if op.kind != "read":
            continue
        of = times[op.subgroup]
        first = of["fetch"] if "fetch" in of else of["update"]
        last = of["flush"] if "flush" in of else of["update"]
        assert of["read"][1] <= first[0] + slack_s
        assert last[1] <= of["write"][0] + slack_s
        in_buffer.setdefault(op.buffer, []).append((of["read"][0], of["write"][1]))
    for spans in in_buffer.values():
        spans.sort()
        following = [*spans[1:], (spans[0][0] + schedule.iteration_s, 0.0)]
        for (_, end), (start, _) in zip(spans, following, strict=True):
            assert end <= start + slack_s
    moved = workload.state_bytes * sum(workload.subgroups[subgroup] for subgroup in plan.stored)
    assert schedule.moved_bytes("storage_read") == schedule.moved_bytes("storage_write") == pytest.approx(moved)


@given(jobs())
@settings(max_examples=examples(200, by_default=20))
def test_make_plan__state_in_storage_is_in_memory_when_it_is_used(case: tuple[Workload, Machine, str]) -> None:
    workload, machine, policy = case
    plan = make_plan(policy, workload, machine)
    assert workload.host_free_bytes is not None
    in_memory = plan_in_memory(policy, workload, machine)
    if not plan.stored:
        # Nothing is in storage where memory suffices, or where all state is on the device.
        fits = needed_host_bytes(in_memory, workload) <= workload.host_free_bytes
        assert fits or len(in_memory.resident | in_memory.parked) == plan.subgroups
        return
    if needed_host_bytes(plan, workload) > workload.host_free_bytes:
        # Then no more can be in storage.
        assert len(plan.stored | plan.resident | plan.parked) == plan.subgroups
    assert_state_is_in_memory_when_used(plan, workload, machine)


@given(jobs(max_subgroups=6))
@settings(max_examples=examples(200, by_default=12))
def test_bound__is_not_above_plans_with_storage(case: tuple[Workload, Machine, str]) -> None:
    workload, machine, policy = case
    in_memory = plan_in_memory(policy, workload, machine)
    overlap = policy.rpartition("overlap=")[2] if "overlap=" in policy else "none"
    bounds = bound(workload, machine, OVERLAPS[overlap])
    assert bounds.exposed_s <= bounds.exposed_whole_s
    for plan in dict.fromkeys(stored_in(in_memory, workload, machine, layout) for layout in LAYOUTS):
        steps = simulate_steps(plan.validate(workload), workload, machine)
        if steps.cost(machine)[:2] == (False, False):
            assert bounds.exposed_whole_s <= steps.mean("exposed_s") + 1e-9 + 1e-5 * steps.mean("iteration_s")
