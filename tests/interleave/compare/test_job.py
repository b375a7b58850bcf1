"""The job of a comparison: its size, its reproducibility, and that there is something
to learn."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.errors import UserError
from ebbtide.interleave.compare.runs import GPT, Job, Shape, find_shape

CPU = torch.device("cpu")


def losses(seed: int, steps: int = 3, optimize: bool = False) -> list[float]:
    job = Job(Shape(1, 64), seed, CPU)
    optimizer = torch.optim.AdamW(job.params, lr=1e-2)
    values = []
    for _ in range(steps):
        loss = job.forward()
        values.append(loss.item())
        if optimize:
            loss.backward()
            optimizer.step()
    return values


@given(st.floats(6, 10.99))
def test_find_shape__has_about_the_given_number_of_parameters(power: float) -> None:
    shape = find_shape(round(10**power))
    assert abs(shape.params / 10**power - 1) < 0.2
    assert shape.layers <= shape.width


@pytest.mark.parametrize("shape", [Shape(1, 64), Shape(3, 128)])
def test_shape__counts_the_parameters_of_the_model(shape: Shape) -> None:
    assert sum(param.numel() for param in GPT(shape).parameters()) == shape.params


@pytest.mark.parametrize("params", [0, 99_999, 10**12])
def test_find_shape__refuses_a_size_that_no_shape_has(params: int) -> None:
    with pytest.raises(UserError, match="--params"):
        find_shape(params)


def test_job__a_seed_gives_the_same_job_and_the_global_generator_is_untouched() -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    one = losses(seed=1)
    assert torch.equal(torch.rand(1), expected)
    assert one == losses(seed=1)
    assert one != losses(seed=2)
    assert len(set(one)) == len(one)


def test_job__parameters_are_in_half_precision_and_get_gradients() -> None:
    job = Job(Shape(1, 64), 0, CPU)
    job.forward().backward()
    assert all(
        param.dtype == torch.bfloat16 and param.grad is not None for param in job.params
    )


@pytest.mark.slow
def test_job__the_loss_falls() -> None:
    values = losses(seed=0, steps=60, optimize=True)
    assert sum(values[-5:]) / 5 < values[0] - 0.5
