"""Comparisons of the kernels of the GPU with the reference, on a GPU or in Triton's
interpreter.

It imports little: a process of its own runs the interpreter."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ebbtide.features.rules import remainder
from ebbtide.interleave.engine.numerics import reference
from ebbtide.interleave.engine.numerics.fingerprint import fingerprint
from ebbtide.interleave.engine.numerics.norm import BLOCK, sum_of_squares
from ebbtide.interleave.engine.numerics.reference import TensorUpdate
from ebbtide.interleave.engine.rules import find_rule
from ebbtide.interleave.engine.rules.adamw import Hyper
from tests.interleave.engine.states import (
    DTYPES,
    State,
    any_bits,
    any_state,
    arguments,
    assert_same,
    bits,
    plausible_state,
    updated,
)

# The second one has a share of 0.5 or more for the first moment, no epsilon, and no
# weight decay.
HYPERS = (Hyper(), Hyper(1e-2, 0.3, 0.5, 0.0, 0.0))
# Where tensors begin in their memory, in elements: some begin at 16 bytes, others do
# not.
BEGINS = (0, 1, 8)


def check_updates(lengths: list[int], begin: int, device: str) -> None:
    """Run updates of all dtypes, hyperparameters and lengths at once, and compare all
    bits with the reference."""
    from ebbtide.interleave.engine.numerics.triton_kernel import gpu_update

    updates: list[TensorUpdate] = []
    states: list[State] = []
    expected: list[State] = []
    for grad in DTYPES:
        for out in DTYPES:
            for number, length in enumerate(lengths):
                make = (any_state, plausible_state)[number % 2]
                state = make(begin + length, grad, out, number)
                scalars = HYPERS[number // 2 % 2].scalars(number + 1, 0.7)
                # What comes before the update stays as it is.
                after = [tensor.clone() for tensor in state]
                for tensor, values in zip(
                    after, updated([t[begin:] for t in state], scalars), strict=True
                ):
                    tensor[begin:] = values
                on_device = [tensor.to(device) for tensor in state]
                updates.append(
                    TensorUpdate(
                        *arguments(tensor[begin:] for tensor in on_device), scalars
                    )
                )
                states.append(on_device)
                expected.append(after)
    gpu_update(updates)
    for state, after in zip(states, expected, strict=True):
        assert_same(state, after)


def check_remainder_updates(lengths: list[int], begin: int, device: str) -> None:
    """Run updates of masters as remainders, together with one of an fp32 master, and
    compare all bits."""
    from ebbtide.interleave.engine.numerics.triton_kernel import gpu_update

    rule = find_rule("adamw-remainder")
    updates, states, expected = [], [], []
    for number, length in enumerate(lengths):
        make = (any_state, plausible_state)[number % 2]
        gradient, master, exp_avg, exp_avg_sq, _ = make(
            begin + length, DTYPES[0], DTYPES[0], number
        )
        param, low = remainder.split_tensor(master)
        state, scalars = (
            [gradient, low, exp_avg, exp_avg_sq, param],
            HYPERS[number % 2].scalars(number + 1, 0.7),
        )
        after = [tensor.clone() for tensor in state]
        reference.update(*arguments(tensor[begin:] for tensor in after), scalars, rule)
        on_device = [tensor.to(device) for tensor in state]
        updates.append(
            TensorUpdate(
                *arguments(tensor[begin:] for tensor in on_device), scalars, rule
            )
        )
        states.append(on_device)
        expected.append(after)
    usual = plausible_state(100, DTYPES[0], DTYPES[0], 0)
    expected.append(updated(usual, HYPERS[0].scalars(1)))
    states.append([tensor.to(device) for tensor in usual])
    gpu_update([*updates, TensorUpdate(*arguments(states[-1]), HYPERS[0].scalars(1))])
    for state, after in zip(states, expected, strict=True):
        assert_same(state, after)


def check_own_master_updates(lengths: list[int], begin: int, device: str) -> None:
    """Run updates of parameters that are their own masters, fp32 and bfloat16, and
    compare all bits."""
    from ebbtide.interleave.engine.numerics.triton_kernel import gpu_update

    updates, states, expected = [], [], []
    for number, length in enumerate(lengths):
        name, dtype = (("adamw", DTYPES[-1]), ("adamw-pure-bf16", torch.bfloat16))[
            number % 2
        ]
        rule, generator = find_rule(name), torch.Generator().manual_seed(number)
        moments = [
            torch.rand(begin + length, generator=generator).to(rule.moment_dtype)
            for _ in rule.moments
        ]
        param = torch.randn(begin + length, generator=generator).to(dtype)
        gradient = torch.randn(begin + length, generator=generator).to(dtype)
        scalars, own = rule.scalars(rule.defaults, number + 1, 0.7), rule.with_masters
        after = [tensor.clone() for tensor in (param, *moments)]
        reference.update(
            gradient[begin:], [row[begin:] for row in after], None, scalars, own
        )
        on_device = [tensor.to(device) for tensor in (param, *moments)]
        rows = [row[begin:] for row in on_device]
        updates.append(
            TensorUpdate(gradient.to(device)[begin:], rows, rows[0], scalars, own)
        )
        states.append(on_device)
        expected.append(after)
    gpu_update(updates)
    for state, after in zip(states, expected, strict=True):
        for row, other in zip(state, after, strict=True):
            assert torch.equal(bits(row.cpu()), bits(other))


def check_rounded_updates(lengths: list[int], begin: int, device: str) -> None:
    """Run updates of bfloat16 moments, rounded stochastically and to nearest, and
    compare all bits."""
    from ebbtide.interleave.engine.numerics.triton_kernel import gpu_update

    rule = find_rule("adamw-bf16")
    updates, states, expected = [], [], []
    for number, length in enumerate(lengths):
        make = (any_state, plausible_state)[number % 2]
        gradient, master, exp_avg, exp_avg_sq, param = make(
            begin + length, DTYPES[0], DTYPES[0], number
        )
        state, position = (
            [gradient, master, exp_avg.bfloat16(), exp_avg_sq.bfloat16(), param],
            2**32 - 700 * number,
        )
        scalars = rule.scalars(
            {**rule.defaults, "stochastic_rounding": number % 4 < 2}, number + 1, 0.7
        )
        after = [tensor.clone() for tensor in state]
        reference.update(
            *arguments(tensor[begin:] for tensor in after), scalars, rule, position
        )
        on_device = [tensor.to(device) for tensor in state]
        tensors = arguments(tensor[begin:] for tensor in on_device)
        updates.append(TensorUpdate(*tensors, scalars, rule, position))
        states.append(on_device)
        expected.append(after)
    gpu_update(updates)
    for state, after in zip(states, expected, strict=True):
        assert_same(state, after)


def check_block_updates(lengths: list[int], begin: int, device: str) -> None:
    """Run updates of 8-bit moments, and compare all bits."""
    from ebbtide.interleave.engine.numerics.triton_kernel import gpu_update

    rule, generator = find_rule("adamw-8bit"), torch.Generator().manual_seed(0)
    updates, states, expected = [], [], []
    for number, length in enumerate(lengths):
        state = [
            any_bits(begin + length, DTYPES[0], generator),
            *rule.zero_rows(length),
        ]
        state.append(torch.randn(begin + length, generator=generator).bfloat16())
        for row in range(1, len(state) - 1):
            # Every second case has plausible scales.
            if row > 3 and number % 2:
                state[row].uniform_(1e-9, 1e-6, generator=generator)
            else:
                state[row].copy_(any_bits(len(state[row]), state[row].dtype, generator))
        state[1:4] = [torch.cat([row[:0].new_zeros(begin), row]) for row in state[1:4]]

        def parts(tensors: State, begin: int = begin) -> State:
            return [
                tensor[begin:] if index in (0, 1, 2, 3, 6) else tensor
                for index, tensor in enumerate(tensors)
            ]

        scalars, after = (
            rule.scalars(rule.defaults, number + 1, 0.7),
            [tensor.clone() for tensor in state],
        )
        reference.update(*arguments(parts(after)), scalars, rule)
        on_device = [tensor.to(device) for tensor in state]
        updates.append(TensorUpdate(*arguments(parts(on_device)), scalars, rule))
        states.append(on_device)
        expected.append(after)
    gpu_update(updates)
    for state, after in zip(states, expected, strict=True):
        for row, other in zip(state, after, strict=True):
            assert torch.equal(bits(row), bits(other))


def check_sums(
    lengths: list[int],
    begins: tuple[int, ...],
    device: str,
    dtypes: Sequence[torch.dtype] = DTYPES,
) -> None:
    from ebbtide.interleave.engine.numerics.triton_kernel import gpu_sums_of_squares

    generator = torch.Generator().manual_seed(0)
    gradients = [
        torch.randn(begin + length, generator=generator).to(dtype)[begin:]
        for dtype in dtypes
        for length, begin in zip(lengths, begins, strict=False)
    ]
    gradients[-1][0] = math.inf
    sums = gpu_sums_of_squares([gradient.to(device) for gradient in gradients])()
    assert sums == list(map(sum_of_squares, gradients))
    # The table of a single tensor is read from the host.
    assert gpu_sums_of_squares([gradients[-1].to(device)])() == sums[-1:]


def check_fingerprints(
    lengths: list[int],
    begins: tuple[int, ...],
    device: str,
    dtypes: Sequence[torch.dtype] = DTYPES,
) -> None:
    from ebbtide.interleave.engine.numerics.triton_kernel import gpu_fingerprint

    generator = torch.Generator().manual_seed(0)
    values = [
        any_bits(begin + length, dtype, generator)[begin:]
        for dtype in dtypes
        for length, begin in zip(lengths, begins, strict=False)
    ]
    assert gpu_fingerprint([value.to(device) for value in values])() == list(
        map(fingerprint, values)
    )


def check_all_in_the_interpreter() -> None:
    for begin in BEGINS[:2]:
        check_updates([0, 1, 1024, 1500], begin, "cpu")
        check_remainder_updates([0, 1, 1024, 1500], begin, "cpu")
        check_own_master_updates([1, 5, 1024, 1500], begin, "cpu")
        check_rounded_updates([1, 1024, 0, 1500], begin, "cpu")
        check_block_updates([1, 1300, 0, 1024], begin, "cpu")
    # The interpreter takes long for a whole block: only one of them.
    for dtypes, length in ((DTYPES[:1], BLOCK + 700), (DTYPES, 777)):
        check_sums([length, 0, 777, 1], (0, 0, 1, 2), "cpu", dtypes)
        check_fingerprints([length, 0, 777, 1], (0, 0, 1, 2), "cpu", dtypes)
