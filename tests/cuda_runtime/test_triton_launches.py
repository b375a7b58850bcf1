"""Launches of the kernels of the GPU by Triton's real launcher: how many, with which
tables, and what is compiled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from ebbtide.interleave.engine.numerics.reference import TensorUpdate
from ebbtide.interleave.engine.params.exchange import Exchange
from ebbtide.interleave.engine.params.gradients import GradientNorm
from ebbtide.interleave.engine.rules.adamw import Hyper
from tests.cuda_runtime.launch_recorder import LaunchRecorder
from tests.interleave.engine.states import DTYPES

BLOCK = 65_536


def make_piece(
    length: int, grad: torch.dtype, out: torch.dtype, step: int = 1, begin: int = 0
) -> TensorUpdate:
    """Return an update whose tensors begin at some element of their memory."""
    gradient, param = (
        torch.zeros(begin + length, dtype=dtype)[begin:] for dtype in (grad, out)
    )
    state = torch.zeros(3, begin + length)[:, begin:]
    return TensorUpdate(
        gradient, tuple(state), param, Hyper(lr=0.1 * step).scalars(step, 0.5)
    )


def test_gpu_update__tables_have_all_addresses_lengths_and_scalars(
    recorder: LaunchRecorder,
) -> None:
    from ebbtide.interleave.engine.numerics import triton_kernel

    lengths = [1, 1024, 0, 5000, 1025]
    updates = [
        make_piece(length, grad, out, step, begin=step % 2)
        for grad in DTYPES
        for out in DTYPES
        for step, length in enumerate(lengths, 1)
    ]
    triton_kernel.gpu_update(updates)
    pairs = list(dict.fromkeys((item.grad.dtype, item.out.dtype) for item in updates))
    # All tables come first: if there is no memory for one, nothing was updated.
    assert recorder.kernels == ["load_table"] * 9 + ["update"] * 9
    for launch, pair in zip(recorder.launches[9:], pairs, strict=True):
        group = [
            item
            for item in updates
            if (item.grad.dtype, item.out.dtype) == pair and len(item.out)
        ]
        assert (launch.programs, launch.threads) == (1 + 1 + 5 + 2, 256)
        assert launch.first_programs.tolist() == [0, 1, 2, 7]
        for row, item in zip(launch.rows, group, strict=True):
            assert row[0] == len(item.out)
            assert row[1:6].tolist() == [
                tensor.data_ptr() for tensor in (item.grad, item.out, *item.state)
            ]
            assert row[6:].view(np.float32)[:9].tolist() == list(
                map(float, item.scalars)
            )
    assert recorder.waits == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda item: {"out": item.out.double()}, "must be bfloat16"),
        (lambda item: {"grad": item.grad[1:]}, "one dimension and length"),
        (
            lambda item: {
                "grad": item.grad.to("meta"),
                "state": [row.to("meta") for row in item.state],
                "out": item.out.to("meta"),
            },
            "cpu device",
        ),
    ],
)
def test_gpu_update__launches_nothing_if_one_piece_is_not_supported(
    recorder: LaunchRecorder,
    change: Callable[[TensorUpdate], dict[str, Any]],
    message: str,
) -> None:
    from ebbtide.interleave.engine.numerics import triton_kernel

    good = make_piece(10, torch.float32, torch.float32)
    with pytest.raises(ValueError, match=message):
        triton_kernel.gpu_update([good, TensorUpdate(**{**vars(good), **change(good)})])
    assert recorder.launches == []


def test_launches__nothing_without_elements(recorder: LaunchRecorder) -> None:
    from ebbtide.interleave.engine.numerics import triton_kernel

    triton_kernel.gpu_update([])
    triton_kernel.gpu_update([make_piece(0, torch.bfloat16, torch.bfloat16)])
    empty = torch.zeros(0)
    for tensors in ([], [empty, empty]):
        assert triton_kernel.gpu_sums_of_squares(tensors)() == [0.0 for _ in tensors]
        assert triton_kernel.gpu_fingerprint(tensors)() == [b"" for _ in tensors]
    assert recorder.launches == []


def model_tensors() -> list[int]:
    """Return the lengths of the parameters of a model with 580 of them: matrices, and
    vectors of odd lengths."""
    return [
        (3 * BLOCK + 64 * index) if index % 4 == 0 else 999 + index
        for index in range(580)
    ]


class LaunchingDevice:
    """The part of a device that computes sums of squares, with the kernels of the
    GPU."""

    def sums_of_squares(
        self, gradients: Sequence[torch.Tensor]
    ) -> Callable[[], list[float]]:
        from ebbtide.interleave.engine.numerics import triton_kernel

        return triton_kernel.gpu_sums_of_squares(gradients)


def test_step__of_580_tensors_has_few_launches_and_compiles_nothing(
    recorder: LaunchRecorder,
) -> None:
    """Tensors of odd lengths, not aligned, one at a time and all together, in two
    combinations of dtypes."""
    from ebbtide.interleave.engine.numerics import triton_kernel

    pairs = [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32)]
    triton_kernel.warm_up(torch.device("cpu"), pairs)
    assert Counter(recorder.compiled) == {
        "load_table": 1,
        "update": 2,
        "block_sums": 2,
        "block_fingerprints": 1,
    }
    recorder.clear()

    params = [
        torch.zeros(length + index % 3, dtype=torch.bfloat16)
        for index, length in enumerate(model_tensors())
    ]
    values = [param[index % 3 :] for index, param in enumerate(params)]
    norm = GradientNorm(LaunchingDevice(), Exchange(), max_norm=1.0)  # type: ignore[arg-type]

    triton_kernel.gpu_fingerprint(values)()
    assert recorder.kernels == ["load_table", "block_fingerprints"]
    assert recorder.waits == 1
    recorder.clear()

    norm.add_all(dict(enumerate(values)))
    norm.scale_factor(values)
    assert recorder.kernels == ["load_table", "block_sums"]
    assert recorder.launches[1].programs == sum(
        -(-len(value) // BLOCK) for value in values
    )
    assert recorder.waits == 1
    recorder.clear()

    # Streamed: one launch each, and one wait for all.
    for index, value in enumerate(values):
        norm.add_all({index: value})
    norm.scale_factor(values)
    assert recorder.kernels == ["block_sums"] * 580
    assert recorder.waits == 1
    recorder.clear()

    # 58 subgroups of ten parameters.
    state = torch.zeros(4 * BLOCK + 64 * 580)
    for begin in range(0, 580, 10):
        group = [state[: len(value)] for value in values[begin : begin + 10]]
        triton_kernel.gpu_update(
            [
                TensorUpdate(value, (row, row, row), value, Hyper().scalars(begin + 1))
                for value, row in zip(values[begin : begin + 10], group, strict=True)
            ]
        )
    assert recorder.kernels == ["load_table", "update"] * 58
    assert recorder.waits == 0
    assert recorder.compiled == []
