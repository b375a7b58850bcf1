"""Streamed gradients: they are offloaded during the backward, and the step has the bits of the reference in any job."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.interleaved_adamw import InterleavedAdamW
from tests.interleave.engine.jobs import Outcome, closing
from tests.interleave.engine.training import Job, Make, ReferenceOptimizer, finish, maker

POLICIES = ("zero-offload", "interleaved:2", "gpu-only")
WARM = 3


def on_device(optimizer: InterleavedAdamW) -> set[int]:
    """Return the subgroups that have a gradient on the device."""
    assert not optimizer._runner.closed
    store = optimizer._runner.engine.store
    on_device_params = (index for index, gradient in enumerate(store.inputs.gradients) if gradient is not None)
    return set().union(*(store.subgroups_of(index) for index in on_device_params))


def offloaded_count(optimizer: Any) -> int:
    """Return how many gradients were offloaded; 0 for the reference optimizer."""
    return len(optimizer._runner.engine.offloaded_params) if isinstance(optimizer, InterleavedAdamW) else 0


@contextmanager
def warm(policy: str = "interleaved:2", **options: Any) -> Iterator[tuple[Job, InterleavedAdamW]]:
    """Yield a job with some steps, after which the number of backwards per step is known."""
    job = Job()
    with closing(maker(policy, "streamed", **options)(job.net.parameters())) as optimizer:
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
        # The gradients of the first layer are the last two; autograd computes them in either order.
        last = (job.net.first.weight, job.net.first.bias)
        handles = [
            p.register_post_accumulate_grad_hook(lambda _: counts.append(offloaded_count(optimizer))) for p in last
        ]
        job.loss().backward()
        for handle in handles:
            handle.remove()
        params_with_grad = [param for param in job.net.parameters() if param.grad is not None]
        assert offloaded_count(optimizer) == len(params_with_grad) > counts[0] > 0


def test_streamed__copies_gradients_to_the_host_before_the_step() -> None:
    """All but those of the first subgroup, which are computed at the end of the backward."""
    job = Job()
    params = [param for name, param in job.net.named_parameters() if not name.startswith(("branches.1", "branches.2"))]
    with closing(maker("zero-offload", "streamed", subgroup_params=600)(params)) as optimizer:
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
        lambda job, optimizer: torch.nn.utils.clip_grad_norm_(job.net.parameters(), 1.0),
        lambda job, optimizer: torch.nn.utils.clip_grad_value_(job.net.parameters(), 1.0),
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
        assert all(torch.equal(param, old) for param, old in zip(job.net.parameters(), before, strict=True))
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
        assert (weight.grad.shape, weight.grad.dtype, weight.grad.device) == (weight.shape, weight.dtype, weight.device)
        assert "GradientPlaceholder" in repr(weight.grad)


def test_placeholder__raises_if_zero_grad_was_forgotten() -> None:
    with warm() as (job, optimizer):
        job.loss().backward()
        optimizer.step()
        with pytest.raises(EngineError, match="zero_grad"):
            job.loss().backward()


class Broken(Exception):
    pass


def fail_backward(job: Job, optimizer: Any) -> None:
    """Run a backward in which a hook raises midway."""

    def raises(gradient: torch.Tensor) -> None:
        raise Broken

    handle = job.net.branches[0].weight.register_hook(raises)
    with pytest.raises(Broken):
        optimizer.scale(job.loss()).backward()
    handle.remove()


def failed_backward(job: Job, optimizer: Any) -> None:
    fail_backward(job, optimizer)
    job.step(optimizer)


def failed_second_backward(job: Job, optimizer: Any) -> None:
    job.loss().backward()
    fail_backward(job, optimizer)
    job.step(optimizer, backwards=2)


def failed_and_continued(job: Job, optimizer: Any) -> None:
    """The gradients of the failed backward count, since nobody called zero_grad."""
    fail_backward(job, optimizer)
    job.loss().backward()
    optimizer.step()


def saved_before_the_step(job: Job, optimizer: Any) -> None:
    job.loss().backward()
    optimizer.state_dict()
    optimizer.step()


def saved_between_backwards(job: Job, optimizer: Any) -> None:
    job.loss().backward()
    optimizer.state_dict()
    job.loss().backward()
    optimizer.step()


def one_more_backward(job: Job, optimizer: Any) -> None:
    job.step(optimizer, backwards=2)


def four_more_backwards(job: Job, optimizer: Any) -> None:
    job.step(optimizer, backwards=5)


def one_backward_fewer(job: Job, optimizer: Any) -> None:
    for backwards in (3, 3, 2):
        job.step(optimizer, backwards=backwards)


def no_step(job: Job, optimizer: Any) -> None:
    job.loss().backward()
    job.step(optimizer)


def set_to_none_by_hand(job: Job, optimizer: Any) -> None:
    """A gradient that is None at the step does not count."""
    job.loss().backward()
    job.net.first.weight.grad = None
    optimizer.step()


def replaced_by_hand(job: Job, optimizer: Any) -> None:
    job.loss().backward()
    job.net.first.weight.grad = torch.ones_like(job.net.first.weight)
    optimizer.step()


def set_to_none_before_a_backward(job: Job, optimizer: Any) -> None:
    job.loss().backward()
    job.net.first.weight.grad = None
    job.loss().backward()
    optimizer.step()


def a_step_without_gradients(job: Job, optimizer: Any) -> None:
    optimizer.step()


def frozen_after_the_backward(job: Job, optimizer: Any) -> None:
    job.loss().backward()
    job.net.first.weight.requires_grad_(False)
    optimizer.step()


def more_groups_before_the_step(job: Job, optimizer: Any) -> None:
    job.loss().backward()
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(700, dtype=torch.bfloat16))]})
    optimizer.step()


UNUSUAL = (
    failed_backward,
    failed_second_backward,
    failed_and_continued,
    saved_before_the_step,
    saved_between_backwards,
    one_more_backward,
    four_more_backwards,
    one_backward_fewer,
    no_step,
    set_to_none_by_hand,
    replaced_by_hand,
    set_to_none_before_a_backward,
    a_step_without_gradients,
    frozen_after_the_backward,
    more_groups_before_the_step,
)


def run_around(make: Make, unusual: Callable[[Job, Any], None]) -> Outcome:
    """Run some steps, something unusual, and more steps; twice, since its effects may show late."""
    job = Job()
    optimizer = make(job.net.parameters(), max_grad_norm=0.5)
    for _ in range(2):
        for _ in range(WARM):
            job.step(optimizer)
        assert offloaded_count(optimizer) == 0
        job.net.zero_grad()
        unusual(job, optimizer)
    for _ in range(WARM):
        job.step(optimizer)
    return finish(job, optimizer)


# Each unusual job runs under one policy, all under each in the slow tests.
@pytest.mark.parametrize(
    ("unusual", "policy"),
    [
        pytest.param(unusual, policy, marks=[] if number % len(POLICIES) == position else pytest.mark.slow)
        for number, unusual in enumerate(UNUSUAL)
        for position, policy in enumerate(POLICIES)
    ],
)
def test_streamed__gives_the_bits_of_the_reference_in_unusual_jobs(
    unusual: Callable[[Job, Any], None], policy: str
) -> None:
    expected = run_around(ReferenceOptimizer, unusual)
    assert run_around(maker(policy, "streamed"), unusual) == expected
