"""Memory: of the device no more than there may be, of the host what the plan says, and all of it back at the end."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ebbtide.interleave.engine.devices.emulated import EmulatedDevice
from ebbtide.interleave.engine.optimizer import InterleavedAdamW
from tests.interleave.engine.jobs import POLICIES, closing
from tests.interleave.engine.training import MACHINE, MODES, Job, ReferenceOptimizer, finish, maker, run, throttle_cpu
from tests.interleave.engine.twins import no_thread_left

SUBGROUP = 500
STATE = 12 * sum(param.numel() for param in Job().net.parameters())
LINK = 40e6


def throttled(capacity: float | None = None) -> EmulatedDevice:
    return EmulatedDevice(capacity, LINK, LINK)


def room(most: float) -> dict[str, float]:
    return {"forward": 0.6 * most, "backward": 0.2 * most, "update": most}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("budget", [0.0, 0.1 * STATE, 0.4 * STATE, 3.0 * STATE, room(0.3 * STATE), room(STATE)])
def test_adaptive_never_takes_more_of_the_device_than_it_may(budget: Any, mode: str) -> None:
    device = throttled()
    make = maker("adaptive", mode, device=device, machine=MACHINE, memory_budget=budget)
    job = Job()
    run(job, make(job.net.parameters()), steps=12)
    most = max(budget.values()) if isinstance(budget, dict) else budget
    assert device.peak_bytes <= most
    assert (device.peak_bytes > 0) == (most > 0)


@pytest.mark.parametrize("mode", MODES)
def test_memory_goes_back_when_there_is_less(mode: str) -> None:
    job = Job()
    expected = run(job, ReferenceOptimizer(job.net.parameters()), steps=16)
    job = Job()
    device = throttled(0.6 * STATE)
    optimizer = maker("adaptive", mode, device=device, machine=MACHINE)(job.net.parameters())
    throttle_cpu(optimizer, lambda: 2e5)
    for _ in range(6):
        job.step(optimizer)
    assert device.peak_bytes > 0.2 * STATE
    device.capacity_bytes = 0.2 * STATE
    # The first step finds out.
    job.step(optimizer)
    device.peak_bytes = device.used_bytes
    for _ in range(9):
        job.step(optimizer)
    assert 0 < device.peak_bytes <= device.capacity_bytes
    assert finish(job, optimizer) == expected


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", [*POLICIES, "adaptive"])
def test_the_host_holds_what_the_plan_says(policy: str, mode: str) -> None:
    job = Job()
    make = maker(policy, mode, machine=MACHINE, memory_budget=1.2 * STATE)
    with closing(make(job.net.parameters())) as optimizer:
        for _ in range(8):
            job.step(optimizer)
        assert not optimizer._driver.closed
        schedule = optimizer._driver.engine.last
        assert schedule is not None
        if schedule.plan is not optimizer.plan:
            job.step(optimizer)
            schedule = optimizer._driver.engine.last
            assert schedule is not None
        assert optimizer._driver.engine.store.host_bytes == pytest.approx(schedule.host_bytes(), rel=0.02)


def deleted(optimizer: InterleavedAdamW) -> None:
    pass


def closed(optimizer: InterleavedAdamW) -> None:
    optimizer.close()


def scheduled(optimizer: InterleavedAdamW) -> None:
    """A scheduler replaces its optimizer's step by one that refers to it."""
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def in_a_backward(optimizer: InterleavedAdamW) -> None:
    """Gradients have left, and no step comes."""
    param = optimizer.param_groups[0]["params"][0]
    param.grad = None
    (param.float() ** 2).sum().backward()


@pytest.mark.parametrize("end", [deleted, closed, scheduled, in_a_backward])
@pytest.mark.parametrize(
    ("policy", "mode"), [("interleaved:2", "streamed"), ("gpu-only", "kept"), ("adaptive", "streamed")]
)
def test_everything_is_given_back(policy: str, mode: str, end: Callable[[InterleavedAdamW], None]) -> None:
    gc.collect()
    device = EmulatedDevice()
    with no_thread_left():
        job = Job()
        optimizer = maker(policy, mode, device=device, machine=MACHINE)(job.net.parameters())
        for _ in range(3):
            job.step(optimizer)
        assert device.peak_bytes > 0
        end(optimizer)
        del optimizer
        gc.collect()
        # The device was given, so it is ours to close.
        device.close()
    assert device.used_bytes == 0


@pytest.mark.parametrize("mode", [pytest.param("kept", marks=pytest.mark.slow), "streamed"])
def test_nothing_grows_over_a_thousand_steps(mode: str) -> None:
    param = torch.nn.Parameter(torch.zeros(300))
    device = EmulatedDevice()
    make = maker("interleaved:2", mode, device=device, subgroup_params=60, max_grad_norm=1.0)
    with closing(make([param])) as optimizer:

        def steps(count: int) -> tuple[int, int, int]:
            for _ in range(count):
                param.grad = None
                (param - 1).square().sum().backward()
                optimizer.step()
            gc.collect()
            assert not optimizer._driver.closed
            optimizer._driver.engine.rest()
            return sys.getallocatedblocks(), device.used_bytes, optimizer._driver.engine.store.host_bytes

        early, late = steps(500), steps(1000)
    # Less than one object a step.
    assert late[0] - early[0] < 800
    assert late[1:] == early[1:]
