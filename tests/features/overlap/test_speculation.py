"""Tests of speculative updates: valid plans, times in closed form, host memory, and
steps that clipping changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.errors import PlanError
from ebbtide.features.overlap.policy import late
from ebbtide.features.overlap.speculation import redone, speculate
from ebbtide.interleave.model.operations import OVERLAPS
from ebbtide.interleave.model.plan import UPDATE, Plan
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies import make_plan
from ebbtide.interleave.simulation.bound import bound
from ebbtide.interleave.simulation.simulator import simulate, simulate_steps
from ebbtide.machines.machine import Machine
from tests.interleave.strategies import machines, workloads

# Four subgroups of 1 G parameters: 1 s of update, 0.2 s of upload and of gradient copy
# each, a gradient every 2 s.
JOB = Workload(
    name="four", params=4_000_000_000, subgroup_params=1_000_000_000, forward_s=4.0, backward_s=8.0,
    clip_active_share=0.25,
)  # fmt: skip
BOX = Machine(
    h2d_bytes_per_s=10e9, d2h_bytes_per_s=10e9, host_memory_bytes_per_s=1e13, cpu_update_params_per_s=1e9,
    cpu_out_of_place_share=1.0, step_overhead_s=0.0,
)  # fmt: skip
few = st.sampled_from(
    ["pipelined", "pipelined,params=blocking", "interleaved:2", "interleaved:3@0.5"]
)


def speculating(count: int) -> Plan:
    return speculate(make_plan("pipelined", JOB, BOX), JOB, count).validate(JOB)


def test_simulate_steps__computes_again_in_the_share_of_clipped_steps() -> None:
    """A clipped step updates all four from 0.2 s after the backward on, the last upload
    follows the last update."""
    steps = simulate_steps(speculating(3), JOB, BOX)
    assert steps.redone is not None
    assert steps.redone.iteration_s == pytest.approx(12 + 0.2 + 4 + 0.2)
    assert steps.mean("iteration_s") == pytest.approx(0.75 * 13.4 + 0.25 * 16.4)


def test_host_bytes__count_a_second_place_for_speculated_state() -> None:
    plain = simulate(make_plan("pipelined", JOB, BOX), JOB, BOX).host_bytes()
    assert simulate(speculating(3), JOB, BOX).host_bytes() == plain + 12 * 3e9


def test_speculate__is_limited_by_host_memory() -> None:
    plain = simulate(make_plan("pipelined", JOB, BOX), JOB, BOX).host_bytes()
    tight = replace(BOX, host_memory_bytes=plain + 12 * 2e9 + 1)
    assert make_plan("pipelined,overlap=backward", JOB, tight).speculated == {2, 3}
    assert make_plan("pipelined,overlap=backward", JOB, BOX).speculated >= {1, 2, 3}


@pytest.mark.parametrize("policy", ["pipelined", "interleaved:2", "adaptive"])
def test_auto__does_not_speculate_where_every_step_is_clipped(policy: str) -> None:
    job = replace(JOB, clip_active_share=1.0, gpu_free=((0.0, 0.0),))
    box = replace(BOX, gpu_update_params_per_s=100e9)
    plan = make_plan(f"{policy},overlap=auto", job, box)
    assert not plan.speculated
    auto_s = simulate(plan, job, box).iteration_s
    assert auto_s <= simulate(make_plan(policy, job, box), job, box).iteration_s


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("upload", {"after": ()}, "does not wait for update of subgroup 3"),
        ("update", {"after": ()}, "does not wait for gradient down of subgroup 3"),
        ("update", {"resource": "gpu"}, "update of subgroup 3 finds no state@gpu"),
    ],
)
def test_validate__refuses_bad_speculation(
    kind: str, change: dict[str, object], message: str
) -> None:
    plan = speculating(1)
    ops = [
        op._replace(**change) if op.kind == kind and op.subgroup == 3 else op
        for op in plan.ops
    ]
    with pytest.raises(PlanError, match=message):
        replace(plan, ops=tuple(ops)).validate(JOB)


@pytest.mark.parametrize(
    "change", [{"clipping": False}, {"gradients_held_until_step": True}]
)
def test_validate__refuses_speculation_where_nothing_is_to_be_known(
    change: dict[str, bool],
) -> None:
    plan, job = speculating(1), replace(JOB, **change)
    ops = tuple(op._replace(start=max(op.start, UPDATE)) for op in plan.ops)
    with pytest.raises(PlanError, match="update of subgroup 3 cannot be speculative"):
        replace(plan, ops=ops).validate(job)


def test_validate__refuses_an_upload_before_clipping() -> None:
    plan = speculating(1)
    clip = next(index for index, op in enumerate(plan.ops) if op.kind == "clip")
    ops = [
        op._replace(after=tuple(index for index in op.after if index != clip))
        for op in plan.ops
    ]
    with pytest.raises(PlanError, match="upload of subgroup 3 does not wait for clip"):
        replace(plan, ops=tuple(op if op.kind == "upload" else old for op, old in zip(ops, plan.ops, strict=True))
        ).validate(JOB)  # fmt: skip


@given(
    few,
    workloads(max_subgroups=8),
    machines(),
    st.integers(0, 8),
    st.booleans(),
    st.booleans(),
)
def test_speculate__is_valid_and_redone_as_the_plan_without_it(
    policy: str,
    workload: Workload,
    machine: Machine,
    count: int,
    uploads_first: bool,
    forward: bool,
) -> None:
    plain = make_plan(policy, workload, machine)
    plan = speculate(plain, workload, count, uploads_first)
    plan = (late(plan, workload) if forward else plan).validate(workload)
    on_cpu = plan.counts().get("update on cpu", 0)
    speculates = workload.clipping and not workload.gradients_held_until_step
    assert len(plan.speculated) == (min(count, on_cpu) if speculates else 0)
    assert sorted((op.kind, op.subgroup) for op in plan.ops) == sorted(
        (op.kind, op.subgroup) for op in plain.ops
    )
    # A clipped step does what the plan without speculation does, and the updates that
    # are not used.
    again = redone(plan)
    assert len(again.ops) == len(plan.ops) + len(plan.speculated)
    kept = [op for op in again.ops if not op.is_speculative]
    assert sorted((op.kind, op.subgroup) for op in kept) == sorted(
        (op.kind, op.subgroup) for op in plain.ops
    )
    clip = next(
        (index for index, op in enumerate(again.ops) if op.kind == "clip"), None
    )
    assert all(clip is None or clip in op.after for op in kept if op.kind == "update")


@given(
    few,
    workloads(max_subgroups=8),
    machines(),
    st.sampled_from(["backward", "both", "auto"]),
)
def test_overlap__is_never_slower_than_none_and_never_below_its_bound(
    policy: str, workload: Workload, machine: Machine, option: str
) -> None:
    plan = make_plan(f"{policy},overlap={option}", workload, machine)
    steps = simulate_steps(plan, workload, machine)
    plain = simulate_steps(make_plan(policy, workload, machine), workload, machine)
    assert steps.cost(machine) <= plain.cost(machine)
    overlap = OVERLAPS["both" if option == "auto" else option]
    if steps.valid.fits_device(None):
        limits = bound(workload, machine, overlap)
        mean_s = steps.mean("iteration_s") - workload.compute_s
        assert (
            mean_s >= max(limits.exposed_s, limits.exposed_whole_s) * (1 - 1e-5) - 1e-9
        )
