"""Streamed gradients: they are offloaded during the backward, and the step has the bits
of the reference in any job."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.interleaved_adamw import InterleavedAdamW
from tests.interleave.engine.jobs import closing
from tests.interleave.engine.training import Job, maker

WARM = 3


def on_device(optimizer: InterleavedAdamW) -> set[int]:
    """Return the subgroups that have a gradient on the device."""
    assert not optimizer._runner.closed
    store = optimizer._runner.engine.store
    on_device_params = (
        index
        for index, gradient in enumerate(store.update.gradients)
        if gradient is not None
    )
    return set().union(*(store.subgroups_of(index) for index in on_device_params))


def offloaded_count(optimizer: InterleavedAdamW) -> int:
    """Return how many gradients were offloaded."""
    return len(optimizer._runner.engine.update.offloaded)


@contextmanager
def warm(
    policy: str = "interleaved:2", **options: Any
) -> Iterator[tuple[Job, InterleavedAdamW]]:
    """Yield a job with some steps, after which the number of backwards per step is
    known."""
    job = Job()
    with closing(
        maker(policy, "streamed", **options)(job.net.parameters())
    ) as optimizer:
        for _ in range(WARM):
            job.step(optimizer)
        job.net.zero_grad()
        yield job, optimizer


def test_streamed__offloads_every_gradient_during_the_last_backward() -> None:
    with warm() as (job, optimizer):
        job.step(optimizer, backwards=2)
        job.net.zero_grad()
        job.loss().backward()
        assert not offloaded_count(optimizer)
        counts = []
        # The gradients of the first layer are the last two; autograd computes them in
        # either order.
        last = (job.net.first.weight, job.net.first.bias)
        handles = [
            p.register_post_accumulate_grad_hook(
                lambda _: counts.append(offloaded_count(optimizer))
            )
            for p in last
        ]
        job.loss().backward()
        for handle in handles:
            handle.remove()
        params_with_grad = [
            param for param in job.net.parameters() if param.grad is not None
        ]
        assert offloaded_count(optimizer) == len(params_with_grad) > counts[0] > 0


def test_streamed__copies_gradients_to_the_host_before_the_step() -> None:
    """All but those of the first subgroup, which are computed at the end of the
    backward."""
    job = Job()
    params = [
        param
        for name, param in job.net.named_parameters()
        if not name.startswith(("branches.1", "branches.2"))
    ]
    with closing(
        maker("zero-offload", "streamed", subgroup_params=600)(params)
    ) as optimizer:
        for _ in range(WARM):
            job.step(optimizer)
        job.net.zero_grad()
        job.loss().backward()
        deadline = time.monotonic() + 60
        while not on_device(optimizer) <= {0} and time.monotonic() < deadline:
            time.sleep(0.001)
        assert on_device(optimizer) <= {0}
        assert offloaded_count(optimizer) == len(params)


@pytest.mark.parametrize(
    "touch",
    [
        lambda job, optimizer: torch.nn.utils.clip_grad_norm_(
            job.net.parameters(), 1.0
        ),
        lambda job, optimizer: torch.nn.utils.clip_grad_value_(
            job.net.parameters(), 1.0
        ),
        lambda job, optimizer: unscale(optimizer),
        lambda job, optimizer: job.net.first.weight.grad.norm(),
        lambda job, optimizer: job.net.first.weight.grad.mul_(0.5),
        lambda job, optimizer: job.net.first.weight.grad.clone(),
        lambda job, optimizer: torch.isfinite(job.net.first.weight.grad),
        lambda job, optimizer: job.net.zero_grad(set_to_none=False),
    ],
)
def test_placeholder__raises_in_computations(touch: Callable[[Job, Any], None]) -> None:
    with warm() as (job, optimizer):
        job.loss().backward()
        before = [param.clone() for param in job.net.parameters()]
        with pytest.raises(EngineError, match=r"max_grad_norm.*loss_scale.*kept"):
            touch(job, optimizer)
        assert all(
            torch.equal(param, old)
            for param, old in zip(job.net.parameters(), before, strict=True)
        )
        optimizer.step()


def unscale(optimizer: InterleavedAdamW) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)


def test_placeholder__has_shape_dtype_device_and_repr() -> None:
    with warm() as (job, optimizer):
        job.loss().backward()
        weight = job.net.first.weight
        assert offloaded_count(optimizer)
        assert (weight.grad.shape, weight.grad.dtype, weight.grad.device) == (
            weight.shape,
            weight.dtype,
            weight.device,
        )
        assert "GradientPlaceholder" in repr(weight.grad)


def test_placeholder__raises_if_zero_grad_was_forgotten() -> None:
    with warm() as (job, optimizer):
        job.loss().backward()
        optimizer.step()
        with pytest.raises(EngineError, match="zero_grad"):
            job.loss().backward()
