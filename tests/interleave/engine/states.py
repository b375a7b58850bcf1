"""States and gradients to update: with any bits, and with plausible values."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ebbtide.interleave.engine.numerics import reference
from ebbtide.interleave.engine.rules.rule import Scalars

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# gradient, master, exp_avg, exp_avg_sq, parameter
State = list[torch.Tensor]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits for comparisons, in which a NaN equals itself and -0 differs from
    0."""
    return tensor.cpu().view(_INTEGERS[tensor.element_size()])


def any_bits(
    length: int, dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    """Return random bit patterns; subnormals, NaN, powers of two, zero and infinity are
    frequent."""
    if dtype == torch.uint8:
        return torch.randint(0, 256, (length,), generator=generator).to(dtype)
    size = 8 * dtype.itemsize
    patterns = torch.randint(
        -(2 ** (size - 1)), 2 ** (size - 1), (length,), generator=generator
    )
    exponent = {
        torch.bfloat16: 0x7F80,
        torch.float16: 0x7C00,
        torch.float32: 0x7F800000,
    }[dtype]
    chosen = torch.randint(0, 8, (length,), generator=generator)
    patterns = torch.where(chosen == 0, patterns & ~exponent, patterns)
    patterns = torch.where(chosen == 1, patterns | exponent, patterns)
    mantissa = (exponent & -exponent) - 1
    patterns = torch.where(chosen == 2, patterns & ~mantissa, patterns)
    return patterns.to(_INTEGERS[dtype.itemsize]).view(dtype)


def any_state(length: int, grad: torch.dtype, out: torch.dtype, seed: int) -> State:
    generator = torch.Generator().manual_seed(seed)
    state = [any_bits(length, torch.float32, generator) for _ in range(3)]
    return [any_bits(length, grad, generator), *state, torch.zeros(length, dtype=out)]


def plausible_state(
    length: int, grad: torch.dtype, out: torch.dtype, seed: int
) -> State:
    generator = torch.Generator().manual_seed(seed)
    normal = [torch.randn(length, generator=generator) for _ in range(4)]
    gradient, master, first, second = (
        values * scale
        for values, scale in zip(normal, (1e-3, 0.02, 1e-4, 1e-3), strict=True)
    )
    return [
        gradient.to(grad),
        master,
        first,
        second.square(),
        torch.zeros(length, dtype=out),
    ]


def arguments(
    state: Iterable[torch.Tensor],
) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """Return gradient, state and parameter, as kernels take them."""
    gradient, *rows, parameter = state
    return gradient, rows, parameter


def updated(state: State, scalars: Scalars) -> State:
    """Return a copy of the state, updated by the reference."""
    copies = [tensor.clone() for tensor in state]
    reference.update(*arguments(copies), scalars)
    return copies


def assert_same(state: State, expected: State) -> None:
    for name, one, other in zip(
        ("gradient", "master", "exp_avg", "exp_avg_sq", "out"),
        state,
        expected,
        strict=True,
    ):
        assert torch.equal(bits(one), bits(other)), name
