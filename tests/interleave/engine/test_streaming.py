"""Gradients leave while the backward runs, and whatever the job does meanwhile, the step has the reference's bits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.optimizer import InterleavedAdamW
from tests.interleave.engine.jobs import Outcome, closing
from tests.interleave.engine.training import Job, Make, ReferenceOptimizer, finish, maker

POLICIES = ("zero-offload", "interleaved:2", "gpu-only")
WARM = 3


def on_device(optimizer: InterleavedAdamW) -> set[int]:
    """The subgroups of which a gradient lies on the device."""
    assert not optimizer._driver.closed
    store = optimizer._driver.engine.store
    held = (index for index, gradient in enumerate(store.inputs.gradients) if gradient is not None)
    return set().union(*(store.subgroups_of(index) for index in held))


def taken(optimizer: Any) -> int:
    """How many gradients have left `p.grad`; none of them where it is the reference's optimizer."""
    return len(optimizer._driver.engine.taken) if isinstance(optimizer, InterleavedAdamW) else 0


@contextmanager
def warm(policy: str = "interleaved:2", **more: Any) -> Iterator[tuple[Job, InterleavedAdamW]]:
    """A job that has come to know how often its backward runs."""
    job = Job()
    with closing(maker(policy, "streamed", **more)(job.net.parameters())) as optimizer:
        for _ in range(WARM):
            job.step(optimizer)
        job.net.zero_grad()
        yield job, optimizer


def test_every_gradient_leaves_during_the_last_backward_of_a_step() -> None:
    with warm() as (job, optimizer):
        job.step(optimizer, backwards=2)
        job.net.zero_grad()
        job.loss().backward()
        assert not taken(optimizer)
        seen = []
        # The gradients of the first layer are the last two; autograd makes them in either order.
        last = (job.net.first.weight, job.net.first.bias)
        handles = [p.register_post_accumulate_grad_hook(lambda _: seen.append(taken(optimizer))) for p in last]
        job.loss().backward()
        for handle in handles:
            handle.remove()
        made = [param for param in job.net.parameters() if param.grad is not None]
        assert taken(optimizer) == len(made) > seen[0] > 0


def test_gradients_leave_the_device_before_the_step() -> None:
    """All but those of the first subgroup, which are made as the backward ends."""
    job = Job()
    params = [param for name, param in job.net.named_parameters() if not name.startswith(("branches.1", "branches.2"))]
    with closing(maker("zero-offload", "streamed", subgroup_params=600)(params)) as optimizer:
        for _ in range(WARM):
            job.step(optimizer)
        job.net.zero_grad()
        job.loss().backward()
        late = time.monotonic() + 60
        while not on_device(optimizer) <= {0} and time.monotonic() < late:
            time.sleep(0.001)
        assert on_device(optimizer) <= {0}
        assert taken(optimizer) == len(params)


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
def test_whoever_computes_with_a_gradient_that_has_left_is_told(touch: Callable[[Job, Any], None]) -> None:
    with warm() as (job, optimizer):
        job.loss().backward()
        before = [param.clone() for param in job.net.parameters()]
        with pytest.raises(EngineError, match=r"max_grad_norm.*loss_scale.*kept"):
            touch(job, optimizer)
        assert all(torch.equal(param, was) for param, was in zip(job.net.parameters(), before, strict=True))
        optimizer.step()


def unscale(optimizer: InterleavedAdamW) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)


def test_a_stand_in_tells_shape_and_kind_and_can_be_shown() -> None:
    with warm() as (job, optimizer):
        job.loss().backward()
        weight = job.net.first.weight
        assert taken(optimizer)
        assert (weight.grad.shape, weight.grad.dtype, weight.grad.device) == (weight.shape, weight.dtype, weight.device)
        assert "Streamed" in repr(weight.grad)


def test_zero_grad_forgotten_is_said() -> None:
    with warm() as (job, optimizer):
        job.loss().backward()
        optimizer.step()
        with pytest.raises(EngineError, match="zero_grad"):
            job.loss().backward()


class Broken(Exception):
    pass


def break_off(job: Job, optimizer: Any) -> None:
    """A backward in which a hook in the middle raises."""

    def raises(gradient: torch.Tensor) -> None:
        raise Broken

    handle = job.net.branches[0].weight.register_hook(raises)
    with pytest.raises(Broken):
        optimizer.scale(job.loss()).backward()
    handle.remove()


def broken_off(job: Job, optimizer: Any) -> None:
    break_off(job, optimizer)
    job.step(optimizer)


def broken_off_at_the_second(job: Job, optimizer: Any) -> None:
    job.loss().backward()
    break_off(job, optimizer)
    job.step(optimizer, backwards=2)


def broken_off_and_gone_on(job: Job, optimizer: Any) -> None:
    """What the broken backward has made counts: nobody called zero_grad."""
    break_off(job, optimizer)
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


def one_backward_more(job: Job, optimizer: Any) -> None:
    job.step(optimizer, backwards=2)


def four_backwards_more(job: Job, optimizer: Any) -> None:
    job.step(optimizer, backwards=5)


def one_backward_less(job: Job, optimizer: Any) -> None:
    for backwards in (3, 3, 2):
        job.step(optimizer, backwards=backwards)


def no_step(job: Job, optimizer: Any) -> None:
    job.loss().backward()
    job.step(optimizer)


def set_to_none_by_hand(job: Job, optimizer: Any) -> None:
    """A gradient that is gone when the step comes does not count."""
    job.loss().backward()
    job.net.first.weight.grad = None
    optimizer.step()


def replaced_by_hand(job: Job, optimizer: Any) -> None:
    job.loss().backward()
    job.net.first.weight.grad = torch.ones_like(job.net.first.weight)
    optimizer.step()


def set_to_none_and_added_to(job: Job, optimizer: Any) -> None:
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


WHAT = (
    broken_off,
    broken_off_at_the_second,
    broken_off_and_gone_on,
    saved_before_the_step,
    saved_between_backwards,
    one_backward_more,
    four_backwards_more,
    one_backward_less,
    no_step,
    set_to_none_by_hand,
    replaced_by_hand,
    set_to_none_and_added_to,
    a_step_without_gradients,
    frozen_after_the_backward,
    more_groups_before_the_step,
)


def around(make: Make, what: Callable[[Job, Any], None]) -> Outcome:
    """Some steps, something unusual, some more steps; twice, since what it leaves behind may show late."""
    job = Job()
    optimizer = make(job.net.parameters(), max_grad_norm=0.5)
    for _ in range(2):
        for _ in range(WARM):
            job.step(optimizer)
        assert taken(optimizer) == 0
        job.net.zero_grad()
        what(job, optimizer)
    for _ in range(WARM):
        job.step(optimizer)
    return finish(job, optimizer)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("what", WHAT)
def test_what_is_unusual_changes_no_bit(what: Callable[[Job, Any], None], policy: str) -> None:
    expected = around(ReferenceOptimizer, what)
    assert around(maker(policy, "streamed"), what) == expected
