"""Policies: the strings that name them, and where they put each subgroup."""

from __future__ import annotations

import pytest
from hypothesis import given

from ebbtide.errors import PolicyError
from ebbtide.interleave.model.plan import STEP, Plan
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies import BUILT_IN, POLICIES, Choice, make_plan, parse, policy
from ebbtide.interleave.policies.plan_builder import PlanBuilder
from ebbtide.interleave.simulation.simulator import simulate
from ebbtide.machines.machine import Machine
from tests.interleave.simulation.test_simulator import BOX, even
from tests.interleave.strategies import fixed_policies, machines, workloads


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "there is no policy ''; there are adaptive, gpu-only, interleaved, pipelined, twin-flow, zero-offload"),
        ("magic", "there is no policy 'magic'"),
        ("Adaptive", "there is no policy 'Adaptive'"),
        ("twin-flow", "'twin-flow' lacks the share on the CPU: write it after a colon"),
        ("twin-flow:", "lacks the share on the CPU"),
        ("twin-flow:3", "the share on the CPU is '3'; it must be a number from 0 to 1"),
        ("twin-flow:-0.1", "must be a number from 0 to 1"),
        ("twin-flow:nan", "must be a number from 0 to 1"),
        ("twin-flow:inf", "must be a number from 0 to 1"),
        ("twin-flow:half", "the share on the CPU is 'half'"),
        ("twin-flow:0.5@2", "the share on the CPU is '0.5@2'"),
        ("interleaved", "lacks the stride: write it after a colon"),
        ("interleaved:0", "the stride is '0'; it must be a number from 1"),
        ("interleaved:1.5", "the stride is '1.5'; it must be a whole number"),
        ("interleaved:-2", "the stride is '-2'"),
        ("interleaved:1e99", "the stride is '1e99'"),
        ("interleaved:2@3", "the offloaded share is '3'; it must be a number from 0 to 1"),
        ("interleaved:2@x", "the offloaded share is 'x'"),
        ("interleaved:@0.5", "lacks the stride"),
        ("zero-offload:1", "zero-offload takes nothing after a colon"),
        ("pipelined:2", "pipelined takes nothing after a colon"),
        ("gpu-only:", "gpu-only takes nothing after a colon"),
        ("adaptive:fast", "adaptive takes nothing after a colon"),
        ("pipelined,grads=sync", "grads is one of async, blocking"),
        ("pipelined,grads", "pipelined has no knob 'grads'; it has grads=async|blocking, params=pipelined|blocking"),
        ("pipelined,stride=2", "pipelined has no knob 'stride=2'"),
        ("pipelined,", "pipelined has no knob ''"),
        ("gpu-only,grads=async", "gpu-only has no knob 'grads=async'; it has none"),
        ("adaptive,params=blocking", "adaptive has no knob"),
    ],
)
def test_strings_that_name_no_policy(text: str, message: str) -> None:
    with pytest.raises(PolicyError) as found:
        make_plan(text, even(4, gpu_free=((0.0, 1e9),)), BOX)
    assert message in str(found.value)
    assert "\n" not in str(found.value)


def test_strings_are_read_with_their_knobs() -> None:
    assert parse("zero-offload").knobs == {"grads": "async", "params": "blocking"}
    assert parse("pipelined").knobs == {"grads": "async", "params": "pipelined"}
    choice = parse(" interleaved:2@0.8 , grads = blocking")
    assert (choice.name, choice.value) == ("interleaved", "2@0.8")
    assert choice.knobs == {"grads": "blocking", "params": "pipelined"}
    assert choice.text == " interleaved:2@0.8 , grads = blocking"
    # Counts may be written as integral floats.
    assert make_plan("interleaved:2e0", even(4), BOX).ops == make_plan("interleaved:2", even(4), BOX).ops


def test_every_built_in_policy_says_what_it_does() -> None:
    assert {parse(text).name for text in BUILT_IN} == set(POLICIES)
    assert all(len(known.summary) > 10 for known in POLICIES.values())


def on_gpu(plan: Plan) -> list[int]:
    """Subgroups that are fetched, in the order of their fetches."""
    return [op.subgroup for op in plan.ops if op.kind == "fetch"]


def test_interleaving_takes_every_kth() -> None:
    assert on_gpu(make_plan("interleaved:2", even(7), BOX)) == [1, 3, 5]
    assert on_gpu(make_plan("interleaved:1", even(3), BOX)) == [0, 1, 2]
    assert on_gpu(make_plan("interleaved:8", even(7), BOX)) == []
    # Of ten, four are resident; of the other six every third.
    plan = make_plan("interleaved:3@0.6", even(10), BOX)
    assert plan.resident == frozenset(range(4))
    assert on_gpu(plan) == [6, 9]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("twin-flow:1", "zero-offload"),
        ("twin-flow:1,params=pipelined", "pipelined"),
        ("zero-offload,params=pipelined", "pipelined"),
        ("pipelined,params=blocking", "zero-offload"),
        ("interleaved:2@0", "gpu-only"),
        ("twin-flow:0", "gpu-only"),
        ("interleaved:99", "pipelined"),
        ("interleaved:99,params=blocking", "zero-offload"),
    ],
)
def test_policies_meet_at_their_ends(one: str, other: str) -> None:
    workload = even(6)
    assert make_plan(one, workload, BOX).ops == make_plan(other, workload, BOX).ops


@given(fixed_policies(), workloads(), machines())
def test_two_buffers_are_all_that_interleaving_needs(policy: str, workload: Workload, machine: Machine) -> None:
    plan = make_plan(policy, workload, machine)
    kept = workload.grad_bytes * sum(workload.subgroups[subgroup] for subgroup in plan.kept_gradients)
    buffers = 2 * workload.state_bytes * max((workload.subgroups[subgroup] for subgroup in on_gpu(plan)), default=0)
    assert simulate(plan, workload, machine).peak_device_bytes <= plan.held_bytes + kept + buffers + 1


def test_gradients_are_kept_only_where_there_is_room_at_every_moment() -> None:
    size = 10**8
    # Two buffers take 2.4 GB; beside them there is room for two of the four gradients, 0.2 GB each.
    narrow = even(8, size, gpu_free=((0.0, 9e9), (4.0, 2.9e9), (5.0, 9e9)))
    plan = make_plan("interleaved:2", narrow, BOX)
    assert plan.kept_gradients == {1, 3}
    assert plan.counts()["gradient up"] == 2
    assert simulate(plan, narrow, BOX).fits_device(None)
    # What is free before the backward does not matter.
    early = even(8, size, gpu_free=((0.0, 2.4e9), (1.0, 9e9)))
    assert make_plan("interleaved:2", early, BOX).kept_gradients == {1, 3, 5, 7}


def test_a_user_adds_a_policy_in_their_own_file() -> None:
    @policy("half-resident", order=("first", "last"))
    def half_resident(workload: Workload, machine: Machine, choice: Choice) -> Plan:
        """The first half, or the last, stays on the GPU.

        More of it."""
        count = len(workload.subgroups)
        home = range(count // 2) if choice.knobs["order"] == "first" else range(count // 2, count)
        builder = PlanBuilder(choice.text, workload)
        builder.gradients(keep=frozenset(home))
        for subgroup in range(count):
            builder.resident(subgroup) if subgroup in home else builder.on_cpu(subgroup)
        return builder.plan()

    try:
        assert POLICIES["half-resident"].summary == "The first half, or the last, stays on the GPU."
        assert make_plan("half-resident", even(6), BOX).resident == {0, 1, 2}
        assert make_plan("half-resident,order=last", even(6), BOX).resident == {3, 4, 5}
        with pytest.raises(PolicyError, match="order is one of first, last"):
            make_plan("half-resident,order=middle", even(6), BOX)
    finally:
        del POLICIES["half-resident"]


def test_without_clipping_only_the_early_update_before_the_step() -> None:
    """DeepSpeed's updates wait for the step; ours follow their gradients."""
    workload = even(6, gpu_free=((0.0, 4e9),), clipping=False)
    waits = make_plan("interleaved:2", workload, BOX)
    assert all(op.point == STEP for op in waits.ops if op.kind == "update")
    follows = make_plan("adaptive", workload, BOX)
    assert any(op.point < STEP for op in follows.ops if op.kind == "update")
    clipped = make_plan("adaptive", even(6, gpu_free=((0.0, 4e9),)), BOX)
    assert all(op.point == STEP for op in clipped.ops if op.kind == "update")
