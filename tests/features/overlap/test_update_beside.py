"""The update out of place, compared by bits with the update in place of a copy."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.interleave.engine.numerics import reference
from ebbtide.interleave.engine.numerics.host_arrays import row_stride
from ebbtide.interleave.engine.numerics.kernels import CpuKernel
from ebbtide.interleave.engine.rules.adamw import Hyper
from ebbtide.interleave.engine.rules.rule import Scalars
from tests.conftest import examples
from tests.interleave.engine.states import (
    DTYPES,
    State,
    any_state,
    arguments,
    assert_same,
    bits,
    plausible_state,
)

Ranges = list[tuple[int, int, Scalars]]


@pytest.fixture(scope="module")
def kernels() -> Iterator[dict[int, CpuKernel]]:
    by_threads = {threads: CpuKernel(threads) for threads in (1, 3)}
    yield by_threads
    for kernel in by_threads.values():
        kernel.close()


def misaligned(rows: list[torch.Tensor], offsets: list[int]) -> list[torch.Tensor]:
    """Return copies that begin at so many elements after a cache line."""
    copies = []
    for row, offset in zip(rows, offsets, strict=True):
        memory = torch.empty(offset + row.numel() + 1, dtype=row.dtype)[offset:-1]
        copies.append(memory.copy_(row))
    return copies


def check_update_beside(
    kernel: CpuKernel, state: State, new: list[torch.Tensor], ranges: Ranges, cast: bool
) -> None:
    """Compare with the reference on a copy, which leaves gradient and old state as they
    were."""
    before = [tensor.clone() for tensor in state]
    expected = [tensor.clone() for tensor in state]
    for begin, end, scalars in ranges:
        reference.update(*arguments(tensor[begin:end] for tensor in expected), scalars)
    if cast:
        expected[4] = before[4]
    kernel.update_beside(
        state[0], state[1:4], new, None if cast else state[4], reversed(ranges)
    )
    assert_same([before[0], *new, state[4]], expected)
    assert_same(state[:4] + before[4:], before)


@st.composite
def split(draw: st.DrawFn, length: int) -> list[tuple[int, int]]:
    """Return ranges with and without gaps between them."""
    cuts = draw(st.lists(st.integers(0, length), max_size=7).map(sorted))
    pairs = list(zip([0, *cuts], [*cuts, length], strict=True))
    return [pair for pair in pairs if draw(st.booleans())]


# The loops convert gradients and parameters as those of the update in place.
QUICK = {(torch.bfloat16, torch.float16)}


@pytest.mark.parametrize(
    ("grad", "out"),
    [
        pytest.param(grad, out, marks=[] if (grad, out) in QUICK else pytest.mark.slow)
        for grad in DTYPES
        for out in DTYPES
    ],
    ids=str,
)
@settings(max_examples=examples(25, by_default=3))
@given(
    data=st.data(),
    length=st.integers(0, 300) | st.integers(1000, 40_000),
    threads=st.sampled_from([1, 3]),
)
def test_update_beside__gives_the_bits_of_the_reference(
    kernels: dict[int, CpuKernel],
    grad: torch.dtype,
    out: torch.dtype,
    data: st.DataObject,
    length: int,
    threads: int,
) -> None:
    make = data.draw(st.sampled_from([any_state, plausible_state]))
    state = make(length, grad, out, data.draw(st.integers(0, 2**31)))
    # Often all begin a line of the cache, and sometimes those of half precision do so
    # only where others end one.
    offsets = data.draw(
        st.just([0] * 8)
        | st.lists(st.sampled_from([0, 1, 3, 8, 16, 32]), min_size=8, max_size=8)
    )
    state = misaligned(state, offsets[:5])
    new = misaligned([torch.full((length,), float("nan"))] * 3, offsets[5:])
    ranges = [
        (begin, end, Hyper(lr=1e-3 * (index + 1)).scalars(2, 0.7))
        for index, (begin, end) in enumerate(data.draw(split(length)))
    ]
    check_update_beside(kernels[threads], state, new, ranges, data.draw(st.booleans()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("half", "length"),
    [(torch.bfloat16, 1_000_003), (torch.float16, 1_000_000)],
    ids=str,
)
def test_update_beside__gives_the_bits_of_the_reference_for_many_elements(
    kernels: dict[int, CpuKernel], half: torch.dtype, length: int
) -> None:
    """Enough elements to show a fused multiply-add, whose result differs in some
    thousandths of all cases."""
    state = plausible_state(length, half, half, 0)
    check_update_beside(
        kernels[3],
        state,
        list(torch.empty(3, length)),
        [(0, length, Hyper().scalars(2, 0.7))],
        False,
    )


def test_update_beside__takes_rows_of_one_tensor(kernels: dict[int, CpuKernel]) -> None:
    """The host memory of a subgroup's state may be a part of longer rows."""
    length = 5001
    state = plausible_state(length, torch.bfloat16, torch.bfloat16, 0)
    old, new = (
        torch.stack([torch.cat((row, row)) for row in state[1:4]]),
        torch.zeros(3, 2 * length),
    )
    scalars = Hyper().scalars(1)
    kernels[3].update_beside(
        state[0], old[:, length:], new[:, :length], state[4], [(0, length, scalars)]
    )
    expected = plausible_state(length, torch.bfloat16, torch.bfloat16, 0)
    reference.update(*arguments(expected), scalars)
    assert_same([state[0], *new[:, :length], state[4]], expected)
    assert not bits(new[:, length:].contiguous()).any()


@given(params=st.integers(0, 10**11))
def test_row_stride__puts_rows_at_different_places_of_pages(params: int) -> None:
    stride = row_stride(params)
    assert params <= stride < params + 1024
    places = sorted(4 * stride * row % 4096 for row in range(3))
    assert all(place % 64 == 0 for place in places)
    assert (
        min(places[1] - places[0], places[2] - places[1], 4096 + places[0] - places[2])
        >= 1024
    )


@pytest.mark.parametrize(
    ("rows", "message"), [(slice(1, 4), "share no memory"), (slice(1, 3), "3 rows")]
)
def test_update_beside__refuses_states_that_do_not_fit(
    kernels: dict[int, CpuKernel], rows: slice, message: str
) -> None:
    memory = torch.zeros(4, 10)
    half = torch.zeros(10, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=message):
        kernels[1].update_beside(
            half, memory[:3], memory[rows], half.clone(), [(0, 10, Hyper().scalars(1))]
        )
    assert not memory.any()
