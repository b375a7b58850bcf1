"""Memory of the optimizer: within the budget on the device, as planned on the host, and
released at the end."""

from __future__ import annotations

import gc
import itertools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ebbtide.interleave.engine.devices.emulated import EmulatedDevice
from ebbtide.interleave.engine.interleaved_adamw import InterleavedAdamW
from tests.conftest import FUZZ, slow
from tests.interleave.engine.jobs import POLICIES, closing
from tests.interleave.engine.training import (
    MACHINE,
    MODES,
    Job,
    ReferenceOptimizer,
    finish,
    maker,
    run,
    throttle_cpu,
)
from tests.interleave.engine.twins import no_thread_left

SUBGROUP = 500
STATE = 12 * sum(param.numel() for param in Job().net.parameters())
LINK = 40e6


def throttled(capacity: float | None = None) -> EmulatedDevice:
    return EmulatedDevice(capacity, LINK, LINK)


def budget_by_phase(max_bytes: float) -> dict[str, float]:
    return {
        "forward": 0.6 * max_bytes,
        "backward": 0.2 * max_bytes,
        "update": max_bytes,
    }


@pytest.mark.parametrize(
    ("budget", "mode"),
    [
        (0.0, "kept"),
        (0.4 * STATE, "streamed"),
        pytest.param(budget_by_phase(0.3 * STATE), "kept", marks=pytest.mark.slow),
        pytest.param(0.0, "streamed", marks=pytest.mark.slow),
        pytest.param(0.4 * STATE, "kept", marks=pytest.mark.slow),
        pytest.param(budget_by_phase(0.3 * STATE), "streamed", marks=pytest.mark.slow),
        *(
            pytest.param(budget, mode, marks=pytest.mark.slow)
            for budget in (0.1 * STATE, 3.0 * STATE, budget_by_phase(STATE))
            for mode in MODES
        ),
    ],
)
def test_adaptive__stays_within_the_memory_budget(budget: Any, mode: str) -> None:
    device = throttled()
    make = maker("adaptive", mode, device=device, machine=MACHINE, memory_budget=budget)
    job = Job()
    run(job, make(job.net.parameters()), steps=12)
    max_bytes = max(budget.values()) if isinstance(budget, dict) else budget
    assert device.peak_bytes <= max_bytes
    assert (device.peak_bytes > 0) == (max_bytes > 0)


@pytest.mark.parametrize(
    "mode", [pytest.param("kept", marks=pytest.mark.slow), "streamed"]
)
def test_adaptive__reduces_its_memory_if_the_capacity_shrinks(mode: str) -> None:
    job = Job()
    expected = run(job, ReferenceOptimizer(job.net.parameters()), steps=16)
    job = Job()
    device = throttled(0.6 * STATE)
    optimizer = maker("adaptive", mode, device=device, machine=MACHINE)(
        job.net.parameters()
    )
    throttle_cpu(optimizer, lambda: 2e5)
    for _ in range(6):
        job.step(optimizer)
    assert device.peak_bytes > 0.2 * STATE
    device.capacity_bytes = 0.2 * STATE
    # The first step fails and lowers the limit.
    job.step(optimizer)
    device.peak_bytes = device.used_bytes
    for _ in range(9):
        job.step(optimizer)
    assert 0 < device.peak_bytes <= device.capacity_bytes
    assert finish(job, optimizer) == expected


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "policy", slow([*POLICIES, "adaptive"], but=("twin-flow:0.4", "adaptive"))
)
def test_host_bytes__equals_that_of_the_schedule(policy: str, mode: str) -> None:
    job = Job()
    make = maker(policy, mode, machine=MACHINE, memory_budget=1.2 * STATE)
    with closing(make(job.net.parameters())) as optimizer:
        for _ in range(8):
            job.step(optimizer)
        assert not optimizer._runner.closed
        schedule = optimizer._runner.engine.last_schedule
        assert schedule is not None
        if schedule.plan is not optimizer.plan:
            job.step(optimizer)
            schedule = optimizer._runner.engine.last_schedule
            assert schedule is not None
        assert optimizer._runner.engine.store.host_bytes == pytest.approx(
            schedule.host_bytes(), rel=0.02
        )


def deleted(optimizer: InterleavedAdamW) -> None:
    pass


def closed(optimizer: InterleavedAdamW) -> None:
    optimizer.close()


def scheduled(optimizer: InterleavedAdamW) -> None:
    """Create a scheduler, which replaces the step of its optimizer by one that refers
    to it."""
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def in_a_backward(optimizer: InterleavedAdamW) -> None:
    """Offload gradients without a step after it."""
    param = optimizer.param_groups[0]["params"][0]
    param.grad = None
    (param.float() ** 2).sum().backward()


ENDS = (deleted, closed, scheduled, in_a_backward)


@pytest.mark.parametrize(
    ("policy", "mode", "end"),
    [
        ("gpu-only", "kept", deleted),
        ("gpu-only", "kept", scheduled),
        ("adaptive", "streamed", in_a_backward),
        *(
            pytest.param("gpu-only", "kept", end, marks=pytest.mark.slow)
            for end in (closed, in_a_backward)
        ),
        *(
            pytest.param("adaptive", "streamed", end, marks=pytest.mark.slow)
            for end in (deleted, closed, scheduled)
        ),
        *(
            pytest.param("interleaved:2", "streamed", end, marks=pytest.mark.slow)
            for end in ENDS
        ),
    ],
)
def test_optimizer__releases_all_memory_and_threads(
    policy: str, mode: str, end: Callable[[InterleavedAdamW], None]
) -> None:
    gc.collect()
    device = EmulatedDevice()
    with no_thread_left():
        job = Job()
        optimizer = maker(policy, mode, device=device, machine=MACHINE)(
            job.net.parameters()
        )
        for _ in range(3):
            job.step(optimizer)
        assert device.peak_bytes > 0
        end(optimizer)
        del optimizer
        gc.collect()
        # The test created the device, so it closes it.
        device.close()
    assert device.used_bytes == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode", [pytest.param("kept", marks=pytest.mark.slow), "streamed"]
)
def test_optimizer__memory_does_not_grow_over_many_steps(mode: str) -> None:
    more_steps = 1000 if FUZZ > 1 else 125
    param = torch.nn.Parameter(torch.zeros(300))
    device = EmulatedDevice()
    make = maker(
        "interleaved:2", mode, device=device, subgroup_params=60, max_grad_norm=1.0
    )
    with closing(make([param])) as optimizer:

        def steps(count: int) -> tuple[int, int, int]:
            for _ in range(count):
                param.grad = None
                (param - 1).square().sum().backward()
                optimizer.step()
            gc.collect()
            assert not optimizer._runner.closed
            optimizer._runner.engine.quiesce()
            return (
                sys.getallocatedblocks(),
                device.used_bytes,
                optimizer._runner.engine.store.host_bytes,
            )

        steps(more_steps // 2)
        used = [steps(more_steps) for _ in range(3)]
    # Less than one object per step: caches grow at first, and at most once.
    assert (
        min(late[0] - early[0] for early, late in itertools.pairwise(used))
        < 0.8 * more_steps
    )
    assert all(entry[1:] == used[0][1:] for entry in used)
