"""Tests of state in storage: plans of random jobs, the checks of plans, and the
bound."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.errors import MachineError, PlanError
from ebbtide.features.advise.choice import choose_among
from ebbtide.features.overlap.speculation import redone, speculate
from ebbtide.features.storage.kinds import path_of
from ebbtide.features.storage.policy import (
    STORED_VERSIONS,
    StorageLayout,
    layouts,
    stored_in,
)
from ebbtide.interleave.model.operations import OVERLAPS, Hold
from ebbtide.interleave.model.plan import BACKWARD, FORWARD, Op, Plan
from ebbtide.interleave.model.schedule import needed_host_bytes
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies import PlanBuilder, as_policies, as_policy, make_plan
from ebbtide.interleave.simulation.bound import bound
from ebbtide.interleave.simulation.simulator import simulate, simulate_steps
from ebbtide.machines.machine import Machine, StoragePath
from tests.conftest import examples
from tests.interleave.simulation.explicit_iterations import run_explicitly
from tests.interleave.simulation.stored_plans import paths
from tests.interleave.strategies import fixed_policies, machines, workloads

GB = 1e9
# Ten subgroups of 1.2 GB of state, that pass through a CPU in 0.1 s each and through
# storage in 0.4 s.
MACHINE = Machine(
    name="desktop",
    host_memory_bytes=64 * GB,
    h2d_bytes_per_s=20 * GB,
    d2h_bytes_per_s=20 * GB,
    host_memory_bytes_per_s=1e12,
    cpu_update_params_per_s=1 * GB,
    gpu_update_params_per_s=20 * GB,
    cpu_cast_params_per_s=10 * GB,
    h2d_pageable_bytes_per_s=10 * GB,
    storage=(StoragePath(3 * GB, 3 * GB),),
)
JOB = Workload(
    "job", 10**9, 10**8, forward_s=1.0, backward_s=2.0, gpu_free=((0.0, 0.0),)
)
# All gradients and parameters have buffers of 4 GB.
COPIES = 4 * GB


def with_host(host_bytes: float, **values: object) -> Workload:
    return replace(JOB, host_free_bytes=host_bytes, **values)


@st.composite
def jobs(draw: st.DrawFn, max_subgroups: int = 10) -> tuple[Workload, Machine, str]:
    """Draw a job whose state host memory holds in part, a machine with storage, and a
    policy."""
    workload = draw(workloads(max_subgroups=max_subgroups))
    machine = replace(
        draw(machines()), storage=tuple(draw(st.lists(paths(), min_size=1, max_size=3)))
    )
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
            st.sampled_from(["pipelined", "interleaved:2", "interleaved:3@0.6"]),
            st.sampled_from([*OVERLAPS]),
        ).map(lambda both: f"{both[0]},overlap={both[1]}")
    )
    return replace(workload, host_free_bytes=host_bytes), machine, policy


def assert_state_is_in_memory_when_used(
    plan: Plan, workload: Workload, machine: Machine
) -> None:
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
        in_buffer.setdefault(op.tag, []).append((of["read"][0], of["write"][1]))
    for spans in in_buffer.values():
        spans.sort()
        following = [*spans[1:], (spans[0][0] + schedule.iteration_s, 0.0)]
        for (_, end), (start, _) in zip(spans, following, strict=True):
            assert end <= start + slack_s
    moved = workload.state_bytes * sum(
        workload.subgroups[subgroup] for subgroup in plan.stored
    )
    assert (
        schedule.moved_bytes("storage_read")
        == schedule.moved_bytes("storage_write")
        == pytest.approx(moved)
    )


@given(jobs())
@settings(max_examples=examples(200, by_default=8))
def test_make_plan__state_in_storage_is_in_memory_when_it_is_used(
    case: tuple[Workload, Machine, str],
) -> None:
    workload, machine, policy = case
    plan = make_plan(policy, workload, machine)
    assert workload.host_free_bytes is not None
    in_memory = as_policy(policy).plan_in_memory(workload, machine)
    if not plan.stored:
        # Nothing is in storage where memory suffices, or where all state is on the
        # device.
        fits = needed_host_bytes(in_memory, workload) <= workload.host_free_bytes
        assert fits or len(in_memory.resident | in_memory.parked) == plan.subgroups
        return
    if needed_host_bytes(plan, workload) > workload.host_free_bytes:
        # Then no more can be in storage.
        assert len(plan.stored | plan.resident | plan.parked) == plan.subgroups
    assert_state_is_in_memory_when_used(plan, workload, machine)


@given(jobs(max_subgroups=6))
@settings(max_examples=examples(200, by_default=6))
def test_bound__is_not_above_plans_with_storage(
    case: tuple[Workload, Machine, str],
) -> None:
    workload, machine, policy = case
    in_memory = as_policy(policy).plan_in_memory(workload, machine)
    overlap = policy.rpartition("overlap=")[2] if "overlap=" in policy else "none"
    bounds = bound(workload, machine, OVERLAPS[overlap])
    assert bounds.exposed_s <= bounds.exposed_whole_s
    for plan in dict.fromkeys(
        stored_in(in_memory, workload, machine, layout)
        for layout in layouts(len(machine.storage))
    ):
        steps = simulate_steps(plan.validate(workload), workload, machine)
        if steps.cost(machine)[:2] == (False, False):
            assert bounds.exposed_whole_s <= steps.mean(
                "exposed_s"
            ) + 1e-9 + 1e-5 * steps.mean("iteration_s")


ALL_STORED = with_host(COPIES + 3.6 * GB)
THREE_BUFFERS = StorageLayout("spread", 3)


def all_stored(policy: str = "pipelined") -> Plan:
    """Return a plan with all ten subgroups in storage, through three buffers."""
    plan = stored_in(
        as_policy(policy).plan_in_memory(ALL_STORED, MACHINE),
        ALL_STORED,
        MACHINE,
        THREE_BUFFERS,
    )
    return plan.validate(ALL_STORED)


def test_stored_in__reads_ahead_in_the_backward_and_writes_in_the_next_forward() -> (
    None
):
    schedule = simulate(all_stored(), ALL_STORED, MACHINE)
    reads = sorted(start for op, start, _ in schedule.items() if op.kind == "read")
    # Three are read from the beginning of the backward on, and each further one when a
    # buffer has been written.
    assert reads == pytest.approx(
        [1.0, 1.4, 1.8, *(3.51 + 0.4 * number for number in range(7))]
    )
    # The last read ends at 6.31 s; its update takes 0.1 s and the upload 0.01 s.
    assert schedule.iteration_s == pytest.approx(6.42)
    assert max(
        end for op, _, end in schedule.items() if op.kind == "write"
    ) == pytest.approx(7.11)
    assert schedule.host_bytes() == pytest.approx(COPIES + 3.6 * GB)


def test_make_plan__with_more_paths_shares_subgroups_by_their_rates() -> None:
    machine = replace(
        MACHINE, storage=(StoragePath(3 * GB, 3 * GB), StoragePath(1 * GB, 1 * GB))
    )
    job = with_host(COPIES + 7.2 * GB)
    plan = stored_in(
        as_policy("pipelined").plan_in_memory(job, machine), job, machine, THREE_BUFFERS
    )
    counts = [
        sum(op.kind == "read" and path_of(op) == path for op in plan.ops)
        for path in range(2)
    ]
    assert counts == [7, 2]
    twice = replace(MACHINE, storage=2 * MACHINE.storage)
    iterations = [
        simulate(make_plan("pipelined", job, rates), job, rates).iteration_s
        for rates in (twice, MACHINE)
    ]
    assert iterations[0] < 0.95 * iterations[1]
    # With little memory, one fast path is better than buffers of both.
    assert simulate(
        make_plan("pipelined", ALL_STORED, machine), ALL_STORED, machine
    ).iteration_s == pytest.approx(6.42)


def test_make_plan__leaves_what_no_path_has_space_for_in_host_memory() -> None:
    space = 4 * STORED_VERSIONS * 1.2 * GB
    machine = replace(MACHINE, storage=(StoragePath(3 * GB, 3 * GB, space),))
    plan = make_plan("pipelined", ALL_STORED, machine)
    assert len(plan.stored) == 4
    assert simulate_steps(plan, ALL_STORED, machine).cost(machine)[:2] == (False, True)


def test_make_plan__keeps_all_state_in_memory_without_storage_or_where_it_fits() -> (
    None
):
    assert not make_plan(
        "pipelined", ALL_STORED, replace(MACHINE, storage=())
    ).storage_buffers
    assert not make_plan(
        "pipelined", with_host(COPIES + 12 * GB), MACHINE
    ).storage_buffers
    assert not make_plan("pipelined", JOB, MACHINE).storage_buffers


def test_choose_among__uses_storage_where_host_memory_is_short() -> None:
    choice = choose_among(as_policies(["pipelined"]), ALL_STORED, MACHINE)
    assert choice.best.plan.storage_buffers
    assert choice.excess is None


def test_stored_in__state_on_its_way_through_the_device_has_buffers_of_its_own() -> (
    None
):
    """Five subgroups are on the device at once: one buffer would never become free."""
    job = replace(ALL_STORED, gpu_free=((0.0, 1e12),))
    builder = PlanBuilder("five", job)
    builder.gradients()
    before: tuple[int, ...] = ()
    for group in (range(5), range(5, 10)):
        for subgroup in group:
            builder.fetch(subgroup, before)
        before = tuple(
            [
                builder.flush(subgroup, builder.update_fetched(subgroup))
                for subgroup in group
            ][-1:]
        )
    plan = stored_in(builder.plan(), job, MACHINE, StorageLayout("spread", 1)).validate(
        job
    )
    assert len(plan.storage_buffers) == 5
    assert_state_is_in_memory_when_used(plan, job, MACHINE)


def test_stored_in__fetches_in_the_forward_wait_for_the_backward() -> None:
    """Until then the write of the iteration before may be late."""
    job = replace(ALL_STORED, gpu_free=((0.0, 1e12),))
    builder = PlanBuilder("early", job)
    builder.gradients()
    for subgroup in range(10):
        builder.fetch(subgroup, start=FORWARD)
    for subgroup in range(10):
        builder.flush(subgroup, builder.update_fetched(subgroup))
    plan = stored_in(builder.plan(), job, MACHINE, THREE_BUFFERS).validate(job)
    assert {op.start for op in plan.ops if op.kind == "fetch"} == {BACKWARD}
    assert_state_is_in_memory_when_used(plan, job, MACHINE)


def test_redone__reads_state_in_storage_again() -> None:
    plan = speculate(
        as_policy("pipelined").plan_in_memory(ALL_STORED, MACHINE), ALL_STORED, 4
    )
    plan = stored_in(plan, ALL_STORED, MACHINE, THREE_BUFFERS).validate(ALL_STORED)
    again = redone(plan)
    counts = again.counts()
    assert (counts["read"], counts["write"]) == (14, 10)
    assert (
        simulate(again, ALL_STORED, MACHINE).iteration_s
        > simulate(plan, ALL_STORED, MACHINE).iteration_s
    )
    # The new state is written beside the old one in storage, so host memory holds it
    # once.
    assert needed_host_bytes(plan, ALL_STORED) == pytest.approx(COPIES + 3.6 * GB)


def changed(plan: Plan, index: int, **values: object) -> Plan:
    ops = list(plan.ops)
    ops[index] = ops[index]._replace(**values)
    return replace(plan, ops=tuple(ops))


@pytest.mark.parametrize(
    "policy", ["pipelined", "interleaved:1", "pipelined,overlap=forward"]
)
def test_validate__refuses_a_plan_without_any_of_the_waits_of_storage(
    policy: str,
) -> None:
    plan = all_stored(policy)
    refused = 0
    for index, op in enumerate(plan.ops):
        for before in op.after:
            if op.kind in ("read", "write") or plan.ops[before].kind == "read":
                without = tuple(other for other in op.after if other != before)
                with pytest.raises(PlanError, match="does not wait for"):
                    changed(plan, index, after=without).validate(ALL_STORED)
                refused += 1
    assert refused == 3 * len(plan.stored) - len(plan.storage_buffers) > 0


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        ("read", {"start": 1.5}, "before the (backward|late operations)"),
        ("read", {"nbytes": 1.0}, "does not move the whole state"),
        ("read", {"tag": 3}, "buffer"),
        ("write", {"resource": "storage_write 1"}, "leaves no new state@file 0"),
        ("write", {"tag": 1}, "finds no own@buffer 1"),
        ("write", {"tag": -1}, "finds no own@buffer -1"),
        (
            "read",
            {"tag": 1},
            "read of subgroup 9 does not wait for write of subgroup 7",
        ),
        ("write", {"holds": Hold(2.5, is_next=True)}, "is due at point"),
        ("read", {"resource": "h2d"}, "cannot run on"),
    ],
)
def test_validate__refuses_wrong_operations_of_storage(
    kind: str, values: dict[str, object], message: str
) -> None:
    plan = all_stored()
    last = max(index for index, op in enumerate(plan.ops) if op.kind == kind)
    with pytest.raises(PlanError, match=message):
        changed(plan, last, **values).validate(ALL_STORED)


def test_validate__refuses_a_read_before_the_backward_where_nothing_is_late() -> None:
    plan = all_stored()
    plan = replace(
        plan, ops=tuple(op._replace(holds=None) for op in plan.ops)
    ).validate(ALL_STORED)
    first = next(index for index, op in enumerate(plan.ops) if op.kind == "read")
    with pytest.raises(
        PlanError, match="read of subgroup 0 starts before the backward"
    ):
        changed(plan, first, start=FORWARD).validate(ALL_STORED)


def test_validate__refuses_lost_state_and_buffers_that_are_too_small() -> None:
    plan = all_stored()
    last = max(index for index, op in enumerate(plan.ops) if op.kind == "write")
    with pytest.raises(PlanError, match="leaves no new state@file 0"):
        replace(
            plan, ops=plan.ops[:last] + _renumbered(plan.ops[last + 1 :], last)
        ).validate(ALL_STORED)
    with pytest.raises(PlanError, match="larger than its buffer"):
        replace(plan, storage_buffers=(1e9,) * 3).validate(ALL_STORED)
    with pytest.raises(PlanError, match="nothing is in storage"):
        replace(
            as_policy("pipelined").plan_in_memory(JOB, MACHINE), storage_buffers=(1e9,)
        ).validate(JOB)


def _renumbered(ops: tuple[Op, ...], removed: int) -> tuple[Op, ...]:
    return tuple(
        op._replace(after=tuple(index - (index > removed) for index in op.after))
        for op in ops
    )


def test_simulate__without_the_paths_of_the_plan_says_how_to_measure_them() -> None:
    with pytest.raises(MachineError, match="calibrate --storage"):
        simulate(all_stored(), ALL_STORED, replace(MACHINE, storage=()))


@pytest.mark.parametrize("host_share", [0.0, 0.5])
def test_bound__of_a_slow_drive_is_what_leaves_memory_over_its_rate(
    host_share: float,
) -> None:
    """Host memory holds a share of the state, or one subgroup at least, all the time.
    Memory that is used to read ahead in forward and backward instead is lost for that,
    so all reads of the rest are exposed."""
    machine = replace(MACHINE, storage=(StoragePath(0.1 * GB, 1000 * GB),))
    bounds = bound(with_host(COPIES + 12 * GB * host_share), machine)
    in_memory = max(1.2 * GB, 12 * GB * host_share)
    assert bounds.exposed_s == pytest.approx(
        (12 * GB - in_memory) / (0.1 * GB), rel=1e-3
    )


@pytest.mark.parametrize(
    "policy", ["pipelined,params=blocking", "zero-offload,params=gpu-cast"]
)
def test_stored_in__writes_state_when_its_masters_have_been_read(policy: str) -> None:
    """The CPU converts the masters after the update, or they are uploaded: the buffer
    must still have them."""
    plan = all_stored(policy)
    reader = "cast" if "blocking" in policy else "upload"
    readers = {
        op.subgroup: index for index, op in enumerate(plan.ops) if op.kind == reader
    }
    for index, op in enumerate(plan.ops):
        if op.kind == "write":
            assert readers[op.subgroup] in op.after
            update = plan.ops[readers[op.subgroup]].after
            with pytest.raises(PlanError, match=f"does not wait for {reader}"):
                changed(plan, index, after=update).validate(ALL_STORED)


def test_make_plan__speculates_no_more_than_the_buffers_hold() -> None:
    """Masters are converted when clipping says that they are valid, and stay in their
    buffers until then."""
    job = with_host(COPIES + 1.2 * GB)
    plan = make_plan("pipelined,params=blocking,overlap=backward", job, MACHINE)
    assert needed_host_bytes(plan, job) <= COPIES + 1.2 * GB
    assert len(plan.speculated) <= 1


def test_redone__reads_state_again_when_its_buffer_is_free() -> None:
    """An update that comes after a speculative one of another subgroup, in the buffer
    that this one had before."""
    plan = speculate(
        as_policy("pipelined").plan_in_memory(ALL_STORED, MACHINE), ALL_STORED, 4
    )
    update = next(index for index, op in enumerate(plan.ops) if op.is_speculative)
    last = max(index for index, op in enumerate(plan.ops) if op.kind == "update")
    first = next(
        index
        for index, op in enumerate(plan.ops)
        if op.kind == "update" and not op.is_speculative
    )
    order = [
        *range(first),
        *range(update, last + 1),
        *range(first, update),
        *range(last + 1, len(plan.ops)),
    ]
    plan = stored_in(
        _ordered(plan, order), ALL_STORED, MACHINE, StorageLayout("spread", 1)
    ).validate(ALL_STORED)
    speculative = next(index for index, op in enumerate(plan.ops) if op.is_speculative)
    other = next(
        index
        for index, op in enumerate(plan.ops)
        if op.kind == "update" and not op.is_speculative
    )
    plan = changed(plan, other, after=(*plan.ops[other].after, speculative)).validate(
        ALL_STORED
    )
    assert not run_explicitly(redone(plan), ALL_STORED, MACHINE, 3).faults


def _ordered(plan: Plan, order: list[int]) -> Plan:
    places = {index: place for place, index in enumerate(order)}
    return replace(
        plan,
        ops=tuple(
            plan.ops[index]._replace(
                after=tuple(places[i] for i in plan.ops[index].after)
            )
            for index in order
        ),
    )
