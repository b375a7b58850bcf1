"""Tests of the policies of other systems that keep state in storage: valid plans, times
in closed form, refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.errors import PlanError, PolicyError
from ebbtide.features.storage.kinds import STATE_ONLY, path_of
from ebbtide.interleave.model.operations import NO_DEPARTURES
from ebbtide.interleave.model.plan import STEP, Op, Plan
from ebbtide.interleave.model.schedule import needed_host_bytes
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies import as_policy, make_plan
from ebbtide.interleave.simulation.simulator import simulate
from ebbtide.machines.machine import Machine, StoragePath
from tests.conftest import ebbtide_in_process, examples
from tests.features.storage.test_policy import COPIES, GB, JOB, MACHINE, jobs

PIPELINES = (
    "",
    ":8,pipeline_read=true",
    ":9,pipeline_write=true",
    ":12,pipeline_read=true,pipeline_write=true",
)
INFINITY = [
    f"zero-infinity{pipeline}{end}"
    for pipeline in PIPELINES
    for end in ("", ",gradients=device")
]
# An upload of 0.01 s follows an update of 0.1 s; the rest takes no time.
FULL = replace(
    MACHINE,
    cpu_cast_params_per_s=1e15,
    h2d_pageable_bytes_per_s=20 * GB,
    d2h_pageable_bytes_per_s=20 * GB,
)
BOTH = "zero-infinity:12,pipeline_read=true,pipeline_write=true"


def spans(
    plan: Plan, workload: Workload, machine: Machine
) -> list[tuple[int, float, float]]:
    """Return buffer, start of the read and end of the write of each stored subgroup."""
    begin: dict[int, tuple[int, float]] = {}
    occupied = []
    for op, start, end in simulate(plan, workload, machine).items():
        if op.kind == "read":
            begin[op.subgroup] = op.tag, start
        elif op.kind == "write" and op.tag is not None:
            occupied.append((*begin[op.subgroup], end))
    return occupied


@settings(max_examples=examples(120, by_default=12), deadline=None)
@given(st.sampled_from([*INFINITY, "mlp-offload"]), jobs(max_subgroups=8))
def test_make_plan__is_valid_and_moves_all_that_is_in_storage(
    policy: str, case: tuple[Workload, Machine, str]
) -> None:
    workload, machine, _ = case
    plan = make_plan(policy, workload, machine)
    assert plan.validate(workload) is plan
    assert plan.is_exact
    stored = sum(workload.subgroups[subgroup] for subgroup in plan.stored)
    gradients = 4.0 * stored if STATE_ONLY in plan.departures.rules else 0.0
    schedule = simulate(plan, workload, machine)
    for direction in ("storage_read", "storage_write"):
        assert schedule.moved_bytes(direction) == pytest.approx(
            workload.state_bytes * stored + gradients
        )
    if policy.startswith("zero-infinity"):
        assert stored == workload.params
    elif needed_host_bytes(plan, workload) > (workload.host_free_bytes or 0.0):
        assert not plan.stored or stored == workload.params
    # A buffer has one subgroup at a time.
    in_use: dict[int, float] = {}
    slack_s = 1e-9 * schedule.iteration_s
    for buffer, start, end in sorted(
        spans(plan, workload, machine), key=lambda span: span[1]
    ):
        assert start >= in_use.get(buffer, 0.0) - slack_s
        in_use[buffer] = end
    if gradients:
        with pytest.raises(PlanError):
            replace(plan, departures=NO_DEPARTURES).validate(workload)


@pytest.mark.parametrize(
    ("policy", "update_s"),
    [
        # Of each subgroup 1.6 GB are read at 3 GB/s and 1.2 GB written. One after the
        # other:
        ("zero-infinity", 10 * (1.6 / 3 + 0.1 + 0.01 + 0.4)),
        # Reads follow one another as long as an update and a write is shorter:
        ("zero-infinity:8,pipeline_read=true", 1.6 / 3 + 9 * 1.6 / 3 + 0.11 + 0.4),
        (BOTH, 10 * 1.6 / 3 + 0.11 + 0.4),
        # A write is shorter than the read that runs at the same time.
        ("zero-infinity:8,pipeline_write=true", 10 * (1.6 / 3 + 0.11) + 0.4),
        # Without gradients:
        (f"{BOTH},gradients=device", 10 * 0.4 + 0.11 + 0.4),
    ],
)
def test_zero_infinity__overlaps_what_its_pipelines_overlap(
    policy: str, update_s: float
) -> None:
    schedule = simulate(make_plan(policy, JOB, FULL), JOB, FULL)
    # The last gradient is copied and written after the backward.
    last_gradient_s = 0.0 if "device" in policy else 0.01 + 0.4 / 3
    assert schedule.update_s == pytest.approx(last_gradient_s + update_s, abs=0.02)


def test_zero_infinity__stops_the_backward_while_all_buffers_are_full() -> None:
    """A gradient every 0.2 s, and 0.4 s to write each. Four buffers are written before
    the fifth gradient goes on."""
    slow = replace(FULL, storage=(StoragePath(3 * GB, 1 * GB),))
    schedule = simulate(make_plan("zero-infinity", JOB, slow), JOB, slow)
    # The first four writes end at 1.81 s, when the fifth gradient of ten is copied, and
    # the next four at 3.42 s, when the ninth is. The tenth follows 0.2 s later.
    assert schedule.backward_s == pytest.approx(3.63)
    roomy = simulate(make_plan("zero-infinity:40", JOB, slow), JOB, slow)
    assert roomy.backward_s == pytest.approx(2.0)
    assert roomy.iteration_s < schedule.iteration_s
    # The pool is all that differs: 36 buffers of 0.4 GB.
    assert roomy.host_bytes() - schedule.host_bytes() == pytest.approx(36 * 0.4 * GB)
    assert schedule.host_bytes() == pytest.approx(COPIES + 4 * 0.4 * GB)


def test_zero_infinity__keeps_gradients_on_the_device_instead() -> None:
    plan = make_plan("zero-infinity,gradients=device", JOB, FULL)
    schedule = simulate(plan, JOB, FULL)
    assert schedule.peak_device_bytes == pytest.approx(4 * JOB.params)
    assert schedule.fits_device(None) is False
    assert not plan.departures.rules


def changed(plan: Plan, kind: str, **values: object) -> Plan:
    """Return the plan with other values of its first operation of a kind."""
    index = next(number for number, op in enumerate(plan.ops) if op.kind == kind)
    op: Op = plan.ops[index]._replace(**values)
    return replace(plan, ops=(*plan.ops[:index], op, *plan.ops[index + 1 :]))


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        ("write", {"after": ()}, "does not wait for gradient down of subgroup 9"),
        ("write", {"nbytes": 1.0}, "does not move the whole gradient"),
        (
            "write",
            {"resource": "storage_write 1"},
            "read of subgroup 9 finds no grad@file 0",
        ),
        ("write", {"subgroup": 0}, "write of subgroup 0 finds no grad@host"),
        (
            "read",
            {"after": ()},
            "read of subgroup 0 does not wait for write of subgroup 0",
        ),
        ("read", {"nbytes": 12.0 * 10**8}, "does not move the whole state"),
    ],
)
def test_validate__refuses_gradients_in_storage_that_are_lost(
    kind: str, values: dict[str, object], message: str
) -> None:
    plan = make_plan("zero-infinity", JOB, FULL)
    with pytest.raises(PlanError, match=message):
        changed(plan, kind, **values).validate(JOB)


@pytest.mark.parametrize(
    ("policy", "storage", "message"),
    [
        ("zero-infinity", (), "needs storage: measure it"),
        (
            "zero-infinity:7,pipeline_read=true",
            FULL.storage,
            "runs out of swap buffers with buffer_count 7; .* need 8",
        ),
        ("zero-infinity:4.5", FULL.storage, "must be a whole number"),
        (
            "zero-infinity",
            (StoragePath(GB, GB, 10 * GB),),
            "needs 14.90 GiB of storage, and 9.31 GiB are free",
        ),
    ],
)
def test_zero_infinity__refuses_what_deepspeed_cannot_run(
    policy: str, storage: tuple[StoragePath, ...], message: str
) -> None:
    with pytest.raises(PolicyError, match=message) as error:
        make_plan(policy, JOB, replace(FULL, storage=storage))
    assert "\n" not in str(error.value)


def test_zero_infinity__uses_the_fastest_path() -> None:
    plan = make_plan(
        BOTH,
        JOB,
        replace(FULL, storage=(StoragePath(9 * GB, GB), StoragePath(3 * GB, 3 * GB))),
    )
    assert {path_of(op) for op in plan.ops if op.kind in ("read", "write")} == {1}


def test_mlp_offload__uses_all_paths_and_keeps_the_rest_in_memory() -> None:
    two = replace(
        FULL, storage=(StoragePath(3 * GB, 3 * GB), StoragePath(1 * GB, 1 * GB))
    )
    job = replace(JOB, host_free_bytes=COPIES + 8 * 1.2 * GB)
    plan = make_plan("mlp-offload", job, two)
    # Three buffers of the fast path and one of the slow one; four subgroups stay in
    # memory.
    assert len(plan.stored) == 6
    counts = [
        sum(op.kind == "read" and path_of(op) == path for op in plan.ops)
        for path in range(2)
    ]
    assert counts == [5, 1]
    assert needed_host_bytes(plan, job) <= job.host_free_bytes
    assert all(
        op.start == STEP and not op.is_late
        for op in plan.ops
        if op.kind in ("read", "write")
    )
    # All within the step, while the pipelined policy reads in the backward and writes
    # in the next forward.
    schedule = simulate(plan, job, two)
    assert (
        min(start for op, start, _ in schedule.items() if op.kind == "read")
        >= job.compute_s
    )
    assert (
        simulate(make_plan("pipelined", job, two), job, two).iteration_s
        < schedule.iteration_s
    )
    # With a second path the step is shorter, if subgroups are small.
    small = replace(job, subgroup_params=10**7, host_free_bytes=COPIES + 2 * 1.2 * GB)
    with_two, with_one = (
        simulate(make_plan("mlp-offload", small, box), small, box).update_s
        for box in (two, FULL)
    )
    assert with_two < 0.9 * with_one


def test_mlp_offload__keeps_all_in_memory_where_it_fits() -> None:
    job = replace(JOB, host_free_bytes=COPIES + 12 * GB)
    plan = make_plan("mlp-offload", job, FULL)
    assert not plan.stored
    assert [op.kind for op in plan.ops] == [
        op.kind for op in as_policy("zero-offload").plan_in_memory(job, FULL).ops
    ]
    with pytest.raises(
        PolicyError, match="needs to know how much host memory there is"
    ):
        make_plan(
            "mlp-offload",
            replace(JOB, host_free_bytes=None),
            replace(FULL, host_memory_bytes=None),
        )


def test_compare__refuses_what_can_be_simulated_alone() -> None:
    run = ebbtide_in_process("compare", "--policy", "zero-infinity")
    assert (run.returncode, run.stdout) == (2, "")
    assert (
        "policy zero-infinity can be simulated, by `ebbtide replay`, and not run"
        in run.stderr
    )
