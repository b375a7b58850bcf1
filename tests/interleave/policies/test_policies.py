"""Tests of policies: their strings, and the plans that they make."""

from __future__ import annotations

import sys
from pkgutil import walk_packages

import pytest
from hypothesis import given

from ebbtide import seams
from ebbtide.errors import PolicyError
from ebbtide.interleave import policies
from ebbtide.interleave.model.plan import STEP, Plan
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies import (
    BUILT_IN,
    POLICIES,
    SYSTEMS,
    PlanBuilder,
    Policy,
    as_policy,
    make_plan,
    policy,
)
from ebbtide.interleave.policies.registry import is_choice
from ebbtide.interleave.simulation.simulator import simulate
from ebbtide.machines.machine import Machine
from tests.interleave.simulation.test_simulator import TEST_MACHINE, even
from tests.interleave.strategies import fixed_policies, machines, workloads

BAD_STRINGS = [
    ("", "gpu-only, interleaved:2, "),
    ("magic", "there is no policy 'magic'; there are adaptive, "),
    ("Adaptive", "there is no policy 'Adaptive'"),
    (
        "twin-flow",
        "'twin-flow' lacks the share on the CPU: write it after a colon, as in "
        "twin-flow:0.5",
    ),
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
    (
        "pipelined,grads",
        "pipelined has no option 'grads'; it has grads=async|blocking, "
        "params=pipelined|blocking",
    ),
    ("pipelined,stride=2", "pipelined has no option 'stride=2'"),
    ("pipelined,", "pipelined has no option ''"),
    (
        "gpu-only,grads=async",
        "gpu-only has no option 'grads=async'; it has "
        "weights=resident|streamed|streamed:K|auto",
    ),
    ("adaptive,params=blocking", "adaptive has no option"),
]


def test_make_plan__refuses_bad_strings() -> None:
    for text, message in BAD_STRINGS:
        with pytest.raises(PolicyError) as error:
            make_plan(text, even(4, gpu_free=((0.0, 1e9),)), TEST_MACHINE)
        assert message in str(error.value)
        assert "\n" not in str(error.value)


def test_is_choice__takes_numbers_in_place_of_k_and_other_choices_as_they_are() -> None:
    choices = ("none", "interleaved:2", "streamed:K")
    for text in ("none", "interleaved:2", "streamed:1", "streamed:12"):
        assert is_choice(text, choices), text
    for text in ("streamed:K", "streamed:0", "streamed", "interleaved:3", "none:1", ""):
        assert not is_choice(text, choices), text


def test_with_options__leaves_defaults_out_and_the_rest_of_the_text_as_it_is() -> None:
    chosen = as_policy("interleaved:2, grads=async ,overlap=auto")
    assert chosen.with_options(overlap="none").text == "interleaved:2, grads=async "
    assert (
        chosen.with_options(overlap="forward").text
        == "interleaved:2, grads=async ,overlap=forward"
    )
    assert chosen.with_options(overlap="forward") == as_policy(
        "interleaved:2, grads=async ,overlap=forward"
    )
    assert (
        as_policy("adaptive,overlap=none").with_options(weights="auto").text
        == "adaptive,overlap=none,weights=auto"
    )
    with pytest.raises(PolicyError, match="has no option 'overlap=forward'"):
        as_policy("twin-flow:0.5").with_options(overlap="forward")


def test_make__is_what_the_text_of_the_parts_is() -> None:
    for made, text in (
        (Policy.make("gpu-only"), "gpu-only"),
        (Policy.make("interleaved", 3), "interleaved:3"),
        (
            Policy.make("twin-flow", "0.5", params="pipelined"),
            "twin-flow:0.5,params=pipelined",
        ),
    ):
        assert made == as_policy(text)
        assert (made.value, made.options) == (
            as_policy(text).value,
            as_policy(text).options,
        )
        assert str(made) == text
    with pytest.raises(PolicyError, match="no policy 'interleave'"):
        Policy.make("interleave")


def test_policy__answers_questions_about_its_overlap() -> None:
    for text, *answers in (
        ("pipelined", "none", False, False, False),
        ("pipelined,overlap=none", "none", False, False, True),
        ("pipelined,overlap=forward", "forward", False, False, True),
        ("pipelined,overlap=auto", "auto", True, True, True),
        ("adaptive", "none", False, True, False),
        ("gpu-only", "none", False, False, False),
    ):
        one = as_policy(text)
        assert [
            one.overlap,
            one.speculates,
            one.depends_on_rates,
            one.states("overlap"),
        ] == answers, text


def test_as_policy__reads_values_and_options() -> None:
    layers = {"weights": "resident", "activations": "keep"}
    assert as_policy("zero-offload").options == {
        "grads": "async",
        "params": "blocking",
        **layers,
    }
    assert as_policy("pipelined").options == {
        "grads": "async",
        "params": "pipelined",
        "overlap": "none",
        **layers,
    }
    chosen = as_policy(" interleaved:2@0.8 , grads = blocking")
    assert (chosen.name, chosen.value) == ("interleaved", "2@0.8")
    assert chosen.options == {
        "grads": "blocking",
        "params": "pipelined",
        "overlap": "none",
        **layers,
    }
    assert chosen.text == " interleaved:2@0.8 , grads = blocking"
    # Counts may be written as integral floats.
    assert (
        make_plan("interleaved:2e0", even(4), TEST_MACHINE).ops
        == make_plan("interleaved:2", even(4), TEST_MACHINE).ops
    )


def test_policies__imports_every_module_of_the_package() -> None:
    modules = {
        module.name
        for module in walk_packages(policies.__path__, f"{policies.__name__}.")
    }
    assert modules <= set(sys.modules)
    plugged = {
        f"{plug.package}.{plug.target}" for plug in seams.plugs("policies").values()
    }
    assert {
        registered.function.__module__ for registered in POLICIES.values()
    } <= modules | plugged


def test_built_in__has_every_policy_with_a_summary() -> None:
    # Policies that decide about layers are for workloads that have them.
    others = {
        name for name, registered in POLICIES.items() if "layers" in registered.without
    }
    assert {as_policy(text).name for text in (*BUILT_IN, *SYSTEMS)} == set(
        POLICIES
    ) - others
    assert all(len(registered.summary) > 10 for registered in POLICIES.values())


def on_gpu(plan: Plan) -> list[int]:
    """Return the subgroups that are fetched, in the order of their fetches."""
    return [op.subgroup for op in plan.ops if op.kind == "fetch"]


def test_interleaved__streams_every_kth_subgroup() -> None:
    assert on_gpu(make_plan("interleaved:2", even(7), TEST_MACHINE)) == [1, 3, 5]
    assert on_gpu(make_plan("interleaved:1", even(3), TEST_MACHINE)) == [0, 1, 2]
    assert on_gpu(make_plan("interleaved:8", even(7), TEST_MACHINE)) == []
    # Of ten, four are resident; of the other six every third.
    plan = make_plan("interleaved:3@0.6", even(10), TEST_MACHINE)
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
def test_make_plan__is_equal_where_policies_coincide(one: str, other: str) -> None:
    workload = even(6)
    assert (
        make_plan(one, workload, TEST_MACHINE).ops
        == make_plan(other, workload, TEST_MACHINE).ops
    )


@given(fixed_policies(), workloads(), machines())
def test_interleaved__needs_two_buffers(
    policy: str, workload: Workload, machine: Machine
) -> None:
    plan = make_plan(policy, workload, machine)
    kept = workload.grad_bytes * sum(
        workload.subgroups[subgroup] for subgroup in plan.kept_gradients
    )
    buffers = (
        2
        * workload.state_bytes
        * max((workload.subgroups[subgroup] for subgroup in on_gpu(plan)), default=0)
    )
    assert (
        simulate(plan, workload, machine).peak_device_bytes
        <= plan.resident_bytes + kept + buffers + 1
    )


def test_interleaved__keeps_only_gradients_that_fit_at_every_moment() -> None:
    size = 10**8
    # Two buffers take 2.4 GB. Two of the four gradients, 0.2 GB each, fit in addition.
    narrow = even(8, size, gpu_free=((0.0, 9e9), (4.0, 2.9e9), (5.0, 9e9)))
    plan = make_plan("interleaved:2", narrow, TEST_MACHINE)
    assert plan.kept_gradients == {1, 3}
    assert plan.counts()["gradient up"] == 2
    assert simulate(plan, narrow, TEST_MACHINE).fits_device(None)
    # The free memory before the backward does not matter.
    early = even(8, size, gpu_free=((0.0, 2.4e9), (1.0, 9e9)))
    assert make_plan("interleaved:2", early, TEST_MACHINE).kept_gradients == {
        1,
        3,
        5,
        7,
    }


def test_policy__registers_a_function_of_the_user() -> None:
    @policy("half-resident", order=("first", "last"))
    def half_resident(workload: Workload, machine: Machine, chosen: Policy) -> Plan:
        """The first half, or the last, stays on the GPU.

        More of it."""
        count = len(workload.subgroups)
        resident = (
            range(count // 2)
            if chosen.options["order"] == "first"
            else range(count // 2, count)
        )
        builder = PlanBuilder(chosen.text, workload)
        builder.gradients(keep=frozenset(resident))
        for subgroup in range(count):
            builder.resident(subgroup) if subgroup in resident else builder.on_cpu(
                subgroup
            )
        return builder.plan()

    try:
        assert (
            POLICIES["half-resident"].summary
            == "The first half, or the last, stays on the GPU."
        )
        assert make_plan("half-resident", even(6), TEST_MACHINE).resident == {0, 1, 2}
        assert make_plan(
            "half-resident,order=last", even(6), TEST_MACHINE
        ).resident == {3, 4, 5}
        with pytest.raises(PolicyError, match="order is one of first, last"):
            make_plan("half-resident,order=middle", even(6), TEST_MACHINE)
    finally:
        del POLICIES["half-resident"]


def test_adaptive__updates_before_the_step_only_without_clipping() -> None:
    """Updates of DeepSpeed wait for the step; those of `adaptive` follow their
    gradients."""
    workload = even(6, gpu_free=((0.0, 4e9),), clipping=False)
    with_step = make_plan("interleaved:2", workload, TEST_MACHINE)
    assert all(op.start == STEP for op in with_step.ops if op.kind == "update")
    with_gradients = make_plan("adaptive", workload, TEST_MACHINE)
    assert any(op.start < STEP for op in with_gradients.ops if op.kind == "update")
    clipped = make_plan("adaptive", even(6, gpu_free=((0.0, 4e9),)), TEST_MACHINE)
    assert all(op.start == STEP for op in clipped.ops if op.kind == "update")
