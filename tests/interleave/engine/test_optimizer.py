"""InterleavedAdamW: the bits of the reference under every policy and in every kind of job."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from ebbtide.interleave.engine.devices.emulated import EmulatedDevice
from ebbtide.interleave.engine.interleaved_adamw import InterleavedAdamW
from tests.interleave.engine.jobs import POLICIES, Outcome, ReferenceAdamW, train
from tests.interleave.engine.training import (
    MACHINE,
    MODES,
    Job,
    Make,
    ReferenceOptimizer,
    finish,
    maker,
    run,
    two_groups,
)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BUDGET = {"forward": 20e3, "backward": 8e3, "update": 26e3}
Scenario = Callable[[Make], Outcome]
SLOW = pytest.mark.slow


def everything(make: Make, dtype: torch.dtype = torch.bfloat16) -> Outcome:
    """Run a job with two groups and a third from step 20 on, a scheduler, clipping, a changing number of backwards, a
    layer norm that is frozen at first and again later, branches without a gradient, and a tied weight."""
    job = Job(dtype, branch=lambda step: step % 3 if step < 30 else 0)
    frozen = list(job.net.norm.parameters())
    for param in frozen:
        param.requires_grad_(False)
    optimizer = make(two_groups(job), max_grad_norm=0.5)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.01, 0.003], total_steps=60)
    for step in range(50):
        if step in (10, 35, 40):
            for param in frozen:
                param.requires_grad_(step != 35)
        if step == 20:
            optimizer.add_param_group({"params": list(job.net.late.parameters()), "lr": 0.02})
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
        job.step(optimizer, step, backwards=(1, 2, 2, 4, 1)[step % 5])
        scheduler.step()
    return finish(job, optimizer)


def accumulated(make: Make) -> Outcome:
    job = Job(branch=lambda step: step % 3)
    return run(job, make(job.net.parameters()), backwards=lambda step: 3)


def clipped_by_torch(make: Make) -> Outcome:
    job = Job()
    optimizer = make(job.net.parameters())
    for _ in range(50):
        job.net.zero_grad()
        job.loss().backward()
        torch.nn.utils.clip_grad_norm_(job.net.parameters(), 0.3)
        optimizer.step()
    return finish(job, optimizer)


def scaled_by_torch(make: Make) -> Outcome:
    job = Job(torch.float32)
    optimizer = make(job.net.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
    for step in range(50):
        job.net.zero_grad()
        scaler.scale(job.loss()).backward()
        if step % 7 == 3:
            job.net.first.weight.grad[1, 2] = torch.inf
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(job.net.parameters(), 0.3)
        scaler.step(optimizer)
        scaler.update()
    return finish(job, optimizer)


def scaled(make: Make) -> Outcome:
    """Run a job whose loss scale starts so high that fp16 gradients overflow."""
    job = Job(torch.float16)
    optimizer = make(job.net.parameters(), loss_scale="dynamic", max_grad_norm=0.5)
    skipped = 0
    for step in range(50):
        before = optimizer.loss_scale
        if step % 9 == 8:
            job.net.zero_grad()
            optimizer.scale(1e8 * job.loss()).backward()
            optimizer.step()
        else:
            job.step(optimizer)
        skipped += optimizer.loss_scale < before
    assert 5 <= skipped < 30
    return finish(job, optimizer)


@cache
def expected(scenario: Callable[..., Outcome], *arguments: Any) -> Outcome:
    outcome = scenario(ReferenceOptimizer, *arguments)
    assert len(set(outcome.losses)) > 40
    return outcome


@pytest.mark.parametrize(
    ("policy", "dtype"),
    [
        # A job with everything runs each policy.
        pytest.param(policy, dtype, marks=[] if policy == "interleaved:2" else SLOW)
        for policy in POLICIES
        for dtype in DTYPES
    ],
)
def test_policies__give_the_bits_of_the_reference(policy: str, dtype: torch.dtype) -> None:
    expected = train(ReferenceAdamW, dtype=dtype)
    assert len(set(expected.losses)) > 40
    outcome = train(lambda params: InterleavedAdamW(params, policy=policy, subgroup_params=1000), dtype=dtype)
    assert outcome == expected


@pytest.mark.parametrize(
    ("policy", "mode"),
    [
        pytest.param(policy, mode, marks=[] if number % len(MODES) == position else SLOW)
        for number, policy in enumerate(POLICIES)
        for position, mode in enumerate(MODES)
    ],
)
def test_optimizer__gives_the_bits_of_the_reference_in_a_job_with_everything(policy: str, mode: str) -> None:
    assert everything(maker(policy, mode)) == expected(everything)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "mode"),
    [
        (torch.bfloat16, "streamed"),
        pytest.param(torch.float16, "kept", marks=SLOW),
        pytest.param(torch.float32, "streamed", marks=SLOW),
    ],
)
def test_adaptive__respects_a_budget_by_phase_on_slow_links(dtype: torch.dtype, mode: str) -> None:
    device = EmulatedDevice(None, 40e6, 40e6)
    make = maker("adaptive", mode, device=device, machine=MACHINE, memory_budget=BUDGET)
    assert everything(make, dtype) == expected(everything, dtype)
    assert 0 < device.peak_bytes <= BUDGET["update"]
    assert device.used_bytes == 0


@pytest.mark.parametrize(
    ("policy", "scenario"),
    [
        *(("interleaved:2", scenario) for scenario in (accumulated, clipped_by_torch, scaled_by_torch, scaled)),
        *(
            pytest.param("adaptive", scenario, marks=SLOW)
            for scenario in (accumulated, clipped_by_torch, scaled_by_torch, scaled)
        ),
    ],
)
def test_kept__gives_the_bits_of_the_reference_in_each_scenario(policy: str, scenario: Scenario) -> None:
    assert scenario(maker(policy, "kept", machine=MACHINE)) == expected(scenario)


@pytest.mark.parametrize(
    ("policy", "scenario"),
    [
        ("interleaved:2", accumulated),
        ("adaptive", scaled),
        pytest.param("interleaved:2", scaled, marks=SLOW),
        pytest.param("adaptive", accumulated, marks=SLOW),
    ],
)
def test_streamed__gives_the_bits_of_the_reference_in_each_scenario(policy: str, scenario: Scenario) -> None:
    assert scenario(maker(policy, "streamed", machine=MACHINE)) == expected(scenario)


def test_interleaved_adamw__takes_names_of_machines_and_devices() -> None:
    job = Job()
    optimizer = InterleavedAdamW(job.net.parameters(), machine="rtx4090", device="cpu", policy="twin-flow:0.5")
    job.step(optimizer, 0)
    assert optimizer.plan.policy == "twin-flow:0.5"
    assert isinstance(optimizer._runner.engine.device, EmulatedDevice)
