"""Tests of recommended updates beside the step, and of what they cost where more steps
are clipped than assumed."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.features.advise import choice
from ebbtide.features.advise.choice import (
    DEEPSPEED_OVERLAP,
    OPTIMIZER_OVERLAP,
    OverlapChoice,
    choose_overlap,
)
from ebbtide.features.advise.recommendation import recommend
from ebbtide.features.deepspeed.engine.patching import enable
from ebbtide.interleave.engine.interleaved_adamw import InterleavedAdamW
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies import make_plan
from ebbtide.interleave.replay.recorded_job import RecordedJob
from ebbtide.interleave.simulation.simulator import Steps, simulate_steps
from ebbtide.machines.machine import Machine
from tests.conftest import examples
from tests.features.advise.test_ablation import ran
from tests.interleave.job_files import machine, workload
from tests.interleave.strategies import machines, workloads

ALWAYS_FREE = 6e9
shares = st.floats(0, 1) | st.sampled_from([0.0, 0.05, 1.0])


def steps_of(policy: str, job: Workload, target: Machine) -> Steps:
    return simulate_steps(make_plan(policy, job, target), job, target)


def overlapped(policy: str, option: str, job: Workload) -> OverlapChoice:
    overlap = choose_overlap(Steps(ran(policy, job, machine())), option, job, machine())
    assert overlap is not None
    return overlap


def test_recommend__asks_for_updates_beside_the_step_where_the_job_can_run_them() -> (
    None
):
    job, target = workload(gpu_free_bytes=ALWAYS_FREE, subgroup_params=5e8), machine()
    advice = recommend(job, target)
    policy = f"adaptive,overlap={OPTIMIZER_OVERLAP}"
    best, plain = advice.setups[:2]
    assert (advice.policy, best.policy, plain.policy) == (policy, policy, "adaptive")
    mean_ms, plain_ms = (
        steps_of(policy, job, target).mean("iteration_s") * 1e3,
        ran("adaptive", job, target),
    )
    assert best.iteration_ms == pytest.approx(mean_ms)
    assert advice.line.startswith(f"{policy}: {mean_ms:,.0f} ms an iteration")
    assert f" win {plain_ms.iteration_s * 1e3 - mean_ms:,.0f} ms (" in advice.line
    assert best.optimizer_code is not None
    assert best.code is not None
    for argument in (
        'policy="adaptive"',
        f'overlap="{OPTIMIZER_OVERLAP}"',
        "model=model",
    ):
        assert f"    {argument},\n" in best.optimizer_code
    # DeepSpeed runs what it can of it.
    late_ms = (
        steps_of(f"adaptive,overlap={DEEPSPEED_OVERLAP}", job, target).mean(
            "iteration_s"
        )
        * 1e3
    )
    assert best.code.startswith(
        f"# DeepSpeed runs it with overlap={DEEPSPEED_OVERLAP}: {late_ms:,.0f} ms an "
        "iteration."
    )
    assert f'    overlap="{DEEPSPEED_OVERLAP}",\n' in best.code
    assert plain.optimizer_code is not None
    assert "overlap" not in plain.optimizer_code
    assert advice.as_json()["overlap"]["without_overlap_ms"] == pytest.approx(
        plain.iteration_ms
    )


def test_recommend__asks_a_job_of_deepspeed_for_the_overlap_that_it_runs() -> None:
    advice = recommend(
        workload(gpu_free_bytes=ALWAYS_FREE, subgroup_params=5e8),
        machine(),
        RecordedJob(stage=3),
    )
    assert advice.policy == f"adaptive,overlap={DEEPSPEED_OVERLAP}"
    assert advice.best.code is not None
    assert advice.best.code.startswith(
        "from ebbtide.interleave.deepspeed import enable"
    )
    for argument in ('policy="adaptive"', f'overlap="{DEEPSPEED_OVERLAP}"'):
        assert f"    {argument},\n" in advice.best.code
    assert "model=" not in advice.best.code


def test_recommend__leaves_an_overlap_out_that_gains_little() -> None:
    long = workload(gpu_free_bytes=27.9e9, forward_s=200.0, subgroup_params=5e8)
    assert recommend(long, machine()).policy == "adaptive"
    assert (
        choose_overlap(
            Steps(ran("zero-offload", long, machine())), "auto", long, machine()
        )
        is None
    )
    # New state beside the old one exceeds the memory of this host.
    small = machine(host_memory_bytes=30e9, d2h_bytes_per_s=5e10)
    job = workload(gpu_free_bytes=0.0)
    speculating = choose_overlap(
        Steps(ran("pipelined", job, small)), "both", job, small
    )
    assert speculating is None or speculating.steps.valid.host_bytes() <= 30e9


@pytest.mark.parametrize(
    "times", [{"forward_s": 0.0, "backward_s": 0.0}, {"forward_s": 1e4}]
)
def test_choose_overlap__searches_for_none_that_could_gain_too_little(
    times: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = workload(gpu_free_bytes=0.0, **times)
    best = Steps(ran("adaptive", job, machine()))
    searched: list[str] = []
    monkeypatch.setattr(choice, "steps_of", lambda policy, *_: searched.append(policy))
    assert choose_overlap(best, "auto", job, machine()) is None
    assert searched == []


@pytest.mark.parametrize(
    ("taker", "overlap"),
    [(InterleavedAdamW, OPTIMIZER_OVERLAP), (enable, DEEPSPEED_OVERLAP)],
)
def test_recommend__names_overlaps_that_the_engine_takes(
    taker: Callable[..., object], overlap: str
) -> None:
    assert overlap in typing.get_args(
        inspect.signature(taker).parameters["overlap"].annotation
    )


def test_most_clipped__is_where_the_mean_iteration_is_as_long_as_without_overlap() -> (
    None
):
    early = overlapped("pipelined", "backward", workload(gpu_free_bytes=0.0))
    assert early.most_clipped is not None
    assert 0.05 < early.most_clipped < 1
    valid, redone = early.steps.valid, early.steps.redone
    assert redone is not None
    mean_s = (
        1 - early.most_clipped
    ) * valid.iteration_s + early.most_clipped * redone.iteration_s
    assert mean_s == pytest.approx(early.without_s)
    assert (
        "5 % of the steps are clipped, and something up to "
        f"{100 * early.most_clipped:.0f} %" in early.text()
    )
    late = overlapped("pipelined", "forward", workload(gpu_free_bytes=0.0))
    assert late.most_clipped is None


@settings(max_examples=examples(25, by_default=8))
@given(workloads(max_subgroups=5, free_known=False), machines(), shares, shares)
def test_auto__is_never_slower_than_none_whatever_share_is_clipped(
    job: Workload, target: Machine, assumed: float, real: float
) -> None:
    """A plan for the real share never is. One for another share is not up to its own
    limit, and a plan for the real share, which the engine makes when it has seen it,
    ends what may be lost beyond."""
    job = replace(job, clip_active_share=assumed)
    none = ran("pipelined", job, target)
    steps = steps_of("pipelined,overlap=auto", job, target)
    assert steps.mean("iteration_s") <= none.iteration_s * (1 + 1e-9)
    choice = OverlapChoice("pipelined", "auto", steps, none.iteration_s)
    limit = choice.most_clipped
    assert limit is None or limit >= assumed - 1e-6
    really = replace(job, clip_active_share=real)
    valid = replace(steps.valid, workload=really)
    mean_s = Steps(valid, steps.redone).mean("iteration_s")
    assert mean_s <= none.iteration_s * (1 + 1e-9) or (
        limit is not None and real > limit
    )
    replanned = steps_of("pipelined,overlap=auto", really, target)
    assert replanned.mean("iteration_s") <= none.iteration_s * (1 + 1e-9)
    if real == 1:
        assert not replanned.valid.plan.speculated
