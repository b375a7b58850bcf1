"""InterleavedAdamW: a budget by phase, and names of machines and devices."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from ebbtide.interleave.engine.devices.emulated import EmulatedDevice
from ebbtide.interleave.engine.interleaved_adamw import InterleavedAdamW
from tests.interleave.engine.jobs import Outcome
from tests.interleave.engine.training import (
    MACHINE,
    Job,
    Make,
    ReferenceOptimizer,
    finish,
    maker,
    two_groups,
)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BUDGET = {"forward": 20e3, "backward": 8e3, "update": 26e3}
Scenario = Callable[[Make], Outcome]
SLOW = pytest.mark.slow


def everything(make: Make, dtype: torch.dtype = torch.bfloat16) -> Outcome:
    """Run a job with two groups and a third from step 20 on, a scheduler, clipping, a
    changing number of backwards, a layer norm that is frozen at first and again later,
    branches without a gradient, and a tied weight."""
    job = Job(dtype, branch=lambda step: step % 3 if step < 30 else 0)
    frozen = list(job.net.norm.parameters())
    for param in frozen:
        param.requires_grad_(False)
    optimizer = make(two_groups(job), max_grad_norm=0.5)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=[0.01, 0.003], total_steps=60
    )
    for step in range(50):
        if step in (10, 35, 40):
            for param in frozen:
                param.requires_grad_(step != 35)
        if step == 20:
            optimizer.add_param_group(
                {"params": list(job.net.late.parameters()), "lr": 0.02}
            )
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
        job.step(optimizer, step, backwards=(1, 2, 2, 4, 1)[step % 5])
        scheduler.step()
    return finish(job, optimizer)


@cache
def expected(scenario: Callable[..., Outcome], *arguments: Any) -> Outcome:
    outcome = scenario(ReferenceOptimizer, *arguments)
    assert len(set(outcome.losses)) > 40
    return outcome


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "mode"),
    [
        (torch.bfloat16, "streamed"),
        pytest.param(torch.float16, "kept", marks=SLOW),
        pytest.param(torch.float32, "streamed", marks=SLOW),
    ],
)
def test_adaptive__respects_a_budget_by_phase_on_slow_links(
    dtype: torch.dtype, mode: str
) -> None:
    device = EmulatedDevice(None, 40e6, 40e6)
    make = maker("adaptive", mode, device=device, machine=MACHINE, memory_budget=BUDGET)
    assert everything(make, dtype) == expected(everything, dtype)
    assert 0 < device.peak_bytes <= BUDGET["update"]
    assert device.used_bytes == 0


def test_interleaved_adamw__takes_names_of_machines_and_devices() -> None:
    job = Job()
    optimizer = InterleavedAdamW(
        job.net.parameters(), machine="rtx4090", device="cpu", policy="twin-flow:0.5"
    )
    job.step(optimizer, 0)
    assert optimizer.plan.policy == "twin-flow:0.5"
    assert isinstance(optimizer._runner.engine.device, EmulatedDevice)
