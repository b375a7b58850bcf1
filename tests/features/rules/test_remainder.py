"""The master as parameter and remainder: split and join, the reference with it, and the
kernel of the CPU."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.features.rules import remainder
from ebbtide.features.rules.adamw_remainder import ADAMW_REMAINDER
from ebbtide.interleave.engine.numerics import compiled, reference
from ebbtide.interleave.engine.numerics.kernels import CpuKernel
from ebbtide.interleave.engine.numerics.reference import (
    BFLOAT16_NAN,
    NAN,
    bfloat16_bits,
)
from ebbtide.interleave.engine.rules.adamw import Hyper
from tests.interleave.engine.numerics.test_kernels import check_code
from tests.interleave.engine.states import (
    DTYPES,
    any_state,
    arguments,
    assert_same,
    bits,
    plausible_state,
)

UPPER = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
LOWER = np.arange(1 << 16, dtype=np.uint32)
# At, next to and between the ends and the tie.
LOW = [0, 1, 2, 0x1234, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0x8002, 0xBEEF, 0xFFFE, 0xFFFF]


def check_split(patterns: npt.NDArray[np.uint32]) -> None:
    """Check that masters come back, and that their parameters are those next to
    them."""
    masters = patterns.view(np.float32)
    params, low = remainder.split(masters)
    back = remainder.join(params, low).view(np.uint32)
    is_nan = np.isnan(masters)
    np.testing.assert_array_equal(back, np.where(is_nan, np.uint32(NAN), patterns))
    assert set(params[is_nan]) <= {BFLOAT16_NAN}
    assert not low[is_nan].any()
    # To nearest, as reference.py rounds, except ties: those go to the parameter with
    # the larger magnitude.
    even, is_tie = bfloat16_bits(masters), patterns & np.uint32(0xFFFF) == 0x8000
    np.testing.assert_array_equal(params[~is_tie], even[~is_tie])
    away = ((patterns >> np.uint32(16)) + np.uint32(1)).astype(np.uint16)
    np.testing.assert_array_equal(params[is_tie & ~is_nan], away[is_tie & ~is_nan])


def test_split__is_undone_by_join_for_all_upper_halves() -> None:
    for low in LOW:
        check_split(UPPER | np.uint32(low))


def test_split__is_undone_by_join_for_all_lower_halves() -> None:
    # Zeros, subnormals, one, the largest numbers, infinities and NaN, of both signs.
    for upper in (
        0,
        1,
        0x007F,
        0x0080,
        0x3F80,
        0x3F81,
        0x7F7E,
        0x7F7F,
        0x7F80,
        0x7F81,
        0x7FFF,
    ):
        for sign in (0, 0x8000):
            check_split(np.uint32((upper | sign) << 16) | LOWER)


@pytest.mark.slow
def test_split__is_undone_by_join_for_many_lower_halves() -> None:
    for low in LOWER[::37]:
        check_split(UPPER | low)


def test_join__takes_a_written_parameter_as_the_master() -> None:
    params = LOWER.astype(np.uint16)
    np.testing.assert_array_equal(
        remainder.join(params, np.zeros_like(params)).view(np.uint32), UPPER
    )


def remainder_state(state: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return gradient, remainder, exp_avg, exp_avg_sq and parameter of a state with
    fp32 masters."""
    gradient, master, exp_avg, exp_avg_sq, _ = state
    param, low = remainder.split_tensor(master)
    return [gradient, low, exp_avg, exp_avg_sq, param]


@given(
    seed=st.integers(0, 2**31),
    step=st.integers(1, 1000),
    scale=st.sampled_from([1.0, 0.3, float("inf")]),
)
def test_update__changes_master_and_moments_as_the_fp32_reference(
    seed: int, step: int, scale: float
) -> None:
    state = any_state(300, torch.bfloat16, torch.float32, seed)
    own = remainder_state([tensor.clone() for tensor in state])
    scalars = Hyper().scalars(step, scale)
    # A master that is NaN is the one quiet NaN, as after every update.
    state[1] = torch.from_numpy(reference.canonical_nan(state[1].numpy()))
    reference.update(*arguments(state), scalars)
    reference.update(*arguments(own), scalars, ADAMW_REMAINDER)
    assert torch.equal(bits(remainder.join_tensors(own[4], own[1])), bits(state[1]))
    for mine, expected in zip(own[2:4], state[2:4], strict=True):
        assert torch.equal(bits(mine), bits(expected))


@given(
    seed=st.integers(0, 2**31),
    length=st.integers(0, 200) | st.integers(16_000, 60_000),
    grad=st.sampled_from(DTYPES),
    scale=st.sampled_from([1.0, 0.3, float("inf")]),
    plausible=st.booleans(),
)
def test_cpu_kernel__gives_the_bits_of_the_reference(
    kernel: CpuKernel,
    seed: int,
    length: int,
    grad: torch.dtype,
    scale: float,
    plausible: bool,
) -> None:
    make = plausible_state if plausible else any_state
    state = remainder_state(make(length, grad, torch.bfloat16, seed))
    expected = [tensor.clone() for tensor in state]
    scalars = Hyper().scalars(3, scale)
    reference.update(*arguments(expected), scalars, ADAMW_REMAINDER)
    kernel.update(*arguments(state), scalars, rule=ADAMW_REMAINDER)
    assert_same(state, expected)


def test_cpu_kernel__refuses_remainders_of_other_parameters(kernel: CpuKernel) -> None:
    gradient, low, exp_avg, exp_avg_sq, param = remainder_state(
        plausible_state(9, torch.bfloat16, torch.bfloat16, 0)
    )
    for out in (None, param.half(), param.float()):
        with pytest.raises(
            ValueError,
            match=r"adamw-remainder needs a parameter that is torch\.bfloat16",
        ):
            kernel.update(
                gradient,
                (low, exp_avg, exp_avg_sq),
                out,
                Hyper().scalars(1),
                rule=ADAMW_REMAINDER,
            )
    with pytest.raises(ValueError, match="one dimension and length"):
        kernel.update(
            gradient,
            (low[1:], exp_avg, exp_avg_sq),
            param,
            Hyper().scalars(1),
            rule=ADAMW_REMAINDER,
        )


def test_compiled_update_of_two_parts__fuses_no_operations() -> None:
    halves, moments = np.zeros((3, 10), np.uint16), np.zeros((2, 10), np.float32)
    loop = compiled.loops_of(ADAMW_REMAINDER).update_split
    check_code(
        loop, halves[0], halves[1], tuple(moments), halves[2], Hyper().scalars(1), 0
    )
