"""The job: of the size asked for, the same again and again, and something to learn."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.errors import UserError
from ebbtide.interleave.experiments.compare.job import GPT, Job, Shape, shape_of

CPU = torch.device("cpu")


def losses(seed: int, steps: int = 3, optimize: bool = False) -> list[float]:
    job = Job(Shape(1, 64), seed, CPU)
    optimizer = torch.optim.AdamW(job.params, lr=1e-2)
    found = []
    for _ in range(steps):
        loss = job.forward()
        found.append(loss.item())
        if optimize:
            loss.backward()
            optimizer.step()
    return found


@given(st.floats(6, 10.99))
def test_a_shape_is_about_as_large_as_asked_for(power: float) -> None:
    shape = shape_of(round(10**power))
    assert abs(shape.params / 10**power - 1) < 0.2
    assert shape.layers <= shape.width


@pytest.mark.parametrize("shape", [Shape(1, 64), Shape(3, 128)])
def test_a_shape_tells_the_models_parameters(shape: Shape) -> None:
    assert sum(param.numel() for param in GPT(shape).parameters()) == shape.params


@pytest.mark.parametrize("params", [0, 99_999, 10**12])
def test_a_size_that_no_shape_has_is_refused(params: int) -> None:
    with pytest.raises(UserError, match="--params"):
        shape_of(params)


def test_a_seed_gives_the_same_job_and_leaves_the_callers_random_numbers_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    one = losses(seed=1)
    assert torch.equal(torch.rand(1), expected)
    assert one == losses(seed=1)
    assert one != losses(seed=2)
    assert len(set(one)) == len(one)


def test_parameters_are_in_half_precision_and_all_get_gradients() -> None:
    job = Job(Shape(1, 64), 0, CPU)
    job.forward().backward()
    assert all(param.dtype == torch.bfloat16 and param.grad is not None for param in job.params)


def test_there_is_something_to_learn() -> None:
    found = losses(seed=0, steps=60, optimize=True)
    assert sum(found[-5:]) / 5 < found[0] - 0.5
