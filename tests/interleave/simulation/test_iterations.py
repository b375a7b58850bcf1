"""Tests of iterations in a row: with an independent event loop that lays them end to
end, and in closed form."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import fmean

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ebbtide.errors import PlanError
from ebbtide.features.overlap.policy import late
from ebbtide.features.overlap.speculation import speculate
from ebbtide.features.storage.policy import StorageLayout, stored_in
from ebbtide.interleave.model.operations import Hold
from ebbtide.interleave.model.plan import BACKWARD, FORWARD, OTHER, STEP, UPDATE, Plan
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies import PlanBuilder, make_plan
from ebbtide.interleave.simulation import iterations
from ebbtide.interleave.simulation.iterations import run_iterations
from ebbtide.interleave.simulation.simulator import Simulator, simulate
from ebbtide.interleave.simulation.tasks import run_tasks
from ebbtide.machines.catalog import find_machine
from ebbtide.machines.machine import Machine, StoragePath
from ebbtide.units import ms_text
from tests.conftest import examples
from tests.interleave.simulation.explicit_iterations import Iteration, run_explicitly
from tests.interleave.simulation.stored_plans import cases
from tests.interleave.strategies import fixed_policies, machines, workloads

GB = 1e9
# Iterations are equal if their lengths differ by less, relatively; some approach one
# length slowly.
SAME_LENGTH, MOST = 1e-10, 48
# Iterations of a long run; its second half has whole periods of 2, 3 and 4.
_LONG_RUN = 121


def steady_iteration(plan: Plan, workload: Workload, machine: Machine) -> Iteration:
    """Return one of many equal iterations."""
    count = 5
    while True:
        run = run_explicitly(plan, workload, machine, count)
        assert not run.faults
        # No iteration follows the last one.
        before, iteration = run.iterations[-3:-1]
        if (
            abs(before.length_s - iteration.length_s)
            <= SAME_LENGTH * iteration.length_s
        ):
            return iteration
        assume(count < MOST)
        count *= 2


def assert_as_explicit(plan: Plan, workload: Workload, machine: Machine) -> None:
    schedule, iteration = (
        simulate(plan, workload, machine),
        steady_iteration(plan, workload, machine),
    )
    assert schedule.iteration_s == pytest.approx(
        iteration.length_s, rel=1e-8, abs=1e-12
    )
    slack = 1e-8 * iteration.length_s
    assert schedule.starts == pytest.approx(iteration.starts, rel=1e-8, abs=slack)
    assert schedule.ends == pytest.approx(iteration.ends, rel=1e-8, abs=slack)


@given(cases())
@settings(max_examples=examples(300, by_default=25))
def test_simulate__with_state_in_storage_equals_explicit_iterations(
    case: tuple[Plan, Workload, Machine],
) -> None:
    assert_as_explicit(*case)


@given(cases(stored=False))
@settings(max_examples=examples(200, by_default=20))
def test_simulate__equals_explicit_iterations(
    case: tuple[Plan, Workload, Machine],
) -> None:
    assert_as_explicit(*case)


@given(fixed_policies(), workloads(max_subgroups=12), machines())
@settings(max_examples=examples(200, by_default=20))
def test_simulate__equals_explicit_iterations_under_every_policy(
    policy: str, workload: Workload, machine: Machine
) -> None:
    assert_as_explicit(make_plan(policy, workload, machine), workload, machine)


@given(cases(again=False), st.data())
@settings(max_examples=examples(300, by_default=30))
def test_validate__accepts_no_plan_in_which_two_states_share_a_buffer(
    case: tuple[Plan, Workload, Machine], data: st.DataObject
) -> None:
    """Any operations may wait for less, begin earlier or be due later than in a valid
    plan."""
    plan, workload, machine = case
    ops = list(plan.ops)
    for index in data.draw(
        st.lists(st.integers(0, len(ops) - 1), min_size=1, max_size=4)
    ):
        op = ops[index]
        change = data.draw(st.sampled_from(["after", "point", "due", "buffer"]))
        if change == "after":
            op = op._replace(
                after=tuple(before for before in op.after if data.draw(st.booleans()))
            )
        elif change == "point":
            op = op._replace(
                start=data.draw(
                    st.sampled_from([0.0, FORWARD, 1.5, BACKWARD, 2.5, UPDATE, STEP])
                )
            )
        elif change == "due":
            due = data.draw(st.sampled_from([None, FORWARD, 1.5, BACKWARD, 2.5]))
            op = op._replace(holds=None if due is None else Hold(due, is_next=True))
        elif op.tag is not None:
            op = op._replace(
                tag=data.draw(st.integers(0, len(plan.storage_buffers) - 1))
            )
        ops[index] = op
    changed = replace(plan, ops=tuple(ops))
    try:
        changed.validate(workload)
    except PlanError:
        return
    assert not run_explicitly(changed, workload, machine, 4).faults


# Two subgroups of 1.2 GB of state: 0.4 s to write, 2 s to read, 0.1 s to update.
MACHINE = Machine(
    h2d_bytes_per_s=20 * GB, d2h_bytes_per_s=20 * GB, host_memory_bytes_per_s=1e13, cpu_update_params_per_s=1e9,
    gpu_update_params_per_s=1e12, step_overhead_s=0.0, host_memory_bytes=64 * GB,
    storage=(StoragePath(0.6 * GB, 3 * GB),),
)  # fmt: skip
JOB = Workload(
    "job", 2 * 10**8, 10**8, forward_s=0.1, backward_s=1.0, host_free_bytes=0.0
)


def test_simulate__reads_into_a_buffer_when_the_iteration_before_has_written_it() -> (
    None
):
    """Subgroup 0 leaves the device when the iteration begins; 1 is in storage, and its
    write is due at the backward.

    From the begin of a backward: read until 2 s, update until 2.1, upload until 2.11,
    which ends the step, and forward until 2.21. The write takes until 2.5, and the next
    read begins then, not when the forward ends.
    """
    builder = PlanBuilder("parked", JOB)
    builder.leave([0])
    builder.gradients(keep=frozenset({0}))
    builder.fetch(0)
    builder.update_fetched(0)
    builder.on_cpu(1)
    plan = stored_in(builder.plan(), JOB, MACHINE, StorageLayout("spread", 1)).validate(
        JOB
    )
    schedule = simulate(plan, JOB, MACHINE)
    assert schedule.iteration_s == pytest.approx(2.5)
    times = {op.kind: (start, end) for op, start, end in schedule.items()}
    assert times["read"][0] + schedule.iteration_s == pytest.approx(times["write"][1])


def alternating_plan() -> tuple[Plan, Workload, Machine]:
    """Return a plan of which every second iteration is longer: parked state leaves the
    device while late updates run.

    The engine does not run it: it begins an iteration when the one before has ended."""
    sizes = (831336019, 627972074, 768915099, 832627212, 793015361)
    machine = find_machine("a100-40gb-pcie").for_ranks(4)
    job = Workload(
        "period two", sum(sizes), max(sizes), sizes=sizes, forward_s=0.428, backward_s=0.856,
        gpu_free=((0.0, 20.4e9),), norm="host",
    )  # fmt: skip
    builder = PlanBuilder("alternating", job)
    builder.leave((0, 2))
    builder.gradients()
    for subgroup in (0, 2):
        builder.fetch(subgroup, after=(builder.leaving(2),), start=FORWARD)
    for subgroup in (3, 1, 4):
        builder.on_cpu(subgroup)
    for subgroup in (0, 2):
        builder.update_fetched(subgroup)
    plan = late(speculate(builder.plan(), job, 3), job)
    points = (OTHER, OTHER, *(op.start for op in builder.ops[2:]))
    early = [
        op._replace(start=point) if op.subgroup in (0, 2) else op
        for op, point in zip(plan.ops, points, strict=True)
    ]
    return replace(plan, ops=tuple(early), cpu_share=0.92), job, machine


def test_simulate__rates_iterations_that_alternate_by_their_mean() -> None:
    plan, job, machine = alternating_plan()
    schedule = simulate(plan, job, machine)
    lengths = [one.iteration_s for one in schedule.cycle]
    assert len(lengths) == 2
    assert max(lengths) > 1.1 * min(lengths)
    run = run_explicitly(plan, job, machine, 40)
    assert schedule.iteration_s == pytest.approx(
        fmean(one.length_s for one in run.iterations[20:40]), rel=1e-6
    )
    phases = (
        schedule.other_s,
        schedule.forward_s,
        schedule.backward_s,
        schedule.update_s,
    )
    assert sum(phases) == pytest.approx(fmean(lengths))
    assert (
        schedule.note
        == f"its iterations alternate: {', '.join(ms_text(1e3 * length) for length in lengths)}"
    )
    assert schedule.settles
    # Those of the whole cycle.
    assert schedule.peak_device_bytes == pytest.approx(
        max(one.peak_device_bytes for one in schedule.cycle)
    )
    assert schedule.fits_device(None)
    assert max(schedule.busy_shares().values()) <= 1.0


def test_simulate__rates_iterations_that_do_not_settle_by_the_second_half(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(iterations, "_period", lambda times: 0)
    schedule = simulate(*alternating_plan())
    assert len(schedule.cycle) == 32
    assert schedule.note is not None
    assert schedule.note.startswith("its iterations do not settle: from ")
    assert schedule.rating_s > 100 * schedule.iteration_s


@given(st.booleans().flatmap(lambda stored: cases(stored=stored)))
@settings(max_examples=examples(100, by_default=10))
def test_simulate__rates_plans_by_the_mean_of_many_iterations(
    case: tuple[Plan, Workload, Machine],
) -> None:
    plan, workload, machine = case
    work = Simulator(workload, machine).iteration_work(plan)
    schedule = run_iterations(work)
    assume(schedule.settles)
    times = run_tasks([work] * _LONG_RUN, math.inf)
    assert times is not None
    begins = times[1][:: len(work)]
    half = _LONG_RUN // 2
    mean_s = (begins[-1] - begins[half]) / (_LONG_RUN - 1 - half)
    assert schedule.iteration_s == pytest.approx(mean_s, rel=1e-6, abs=1e-12)
