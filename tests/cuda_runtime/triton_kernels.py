"""ebbtide's Triton kernels on the stand-in: from their tables in memory, by the CPU's kernels, later, on their stream.

What a launch of Triton itself gives to the driver, `tests/cuda_mock` compares.
"""

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ebbtide.interleave.engine.numerics.fingerprint import KEYS
from ebbtide.interleave.engine.numerics.kernels import CpuKernel
from ebbtide.interleave.engine.numerics.norm import BLOCK as SUMS_BLOCK
from ebbtide.interleave.engine.rules.rule import UpdateRule
from tests.cuda_runtime import runtime
from tests.cuda_runtime.kernels import host_bytes
from tests.cuda_runtime.runtime import Bytes

Words = npt.NDArray[np.int64]
# By the names of Triton's types.
_TYPES = {"uint16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_REMAINDER = "uint16"


def install() -> None:
    """Let the kernels of the engine run on the stand-in, where Triton is installed."""
    from ebbtide.interleave.engine.numerics import triton_kernel

    launcher = _Launcher()
    own_update = triton_kernel.gpu_update

    def gpu_update(updates: Any) -> None:
        launcher.rule = updates[0].rule if updates else None
        own_update(updates)

    triton_kernel.gpu_update = gpu_update
    triton_kernel._launch = launcher.launch


def _words(address: int, count: int) -> Words:
    return np.ctypeslib.as_array((ctypes.c_int64 * count).from_address(runtime.alias(address)))


def _tensor(address: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    if not count:
        return torch.empty(0, dtype=dtype)
    return host_bytes(int(address), count * dtype.itemsize).view(dtype)


def _type(triton_type: Any) -> torch.dtype:
    return _TYPES[str(triton_type)]


class _Launcher:
    """Launches of the kernels, with one CPU kernel for all."""

    def __init__(self) -> None:
        self._kernel = CpuKernel(1)
        # Of the updates that are launched next.
        self.rule: UpdateRule | None = None

    def launch(self, function: Any, programs: int, *arguments: Any, **options: Any) -> None:
        if programs:
            getattr(self, f"_{function.__name__}")(*arguments, **options)

    def _load_table(self, source: torch.Tensor, target: torch.Tensor, length: int) -> None:
        of, to = source.data_ptr(), target.data_ptr()

        def load() -> None:
            _words(to, length)[:] = _words(of, length)

        runtime.launch("load_table", load, [Bytes(of, 8 * length)], [Bytes(to, 8 * length)])

    def _update(self, table: torch.Tensor, count: int, **options: Any) -> None:
        rule, address, moments, factors = self.rule, table.data_ptr(), options["moments"], options["factors"]
        assert rule is not None
        grad_type, out_type = _type(options["grad_dtype"]), _type(options["out_dtype"])
        dtypes = rule.dtypes(str(options["master_dtype"]) == _REMAINDER)
        # After the factors: a position with rounded moments; with scaled ones the numbers of codes, and the scales.
        first_other = 4 + moments + (factors + 1) // 2
        columns = first_other + options["rounds"] + options["scaled"] * (1 + moments)

        def update() -> None:
            rows = _words(address, count * (1 + columns))[count:].reshape(count, columns).copy()
            for row in rows:
                length, grad, out = row[:3].tolist()
                others = row[first_other:].tolist()
                addresses = [*row[3 : 4 + moments].tolist(), *others[1:]]
                lengths = (part.stop for part in rule.row_slices(0, length, 0))
                state = list(map(_tensor, addresses, lengths, dtypes))
                scalars = row[4 + moments : first_other].view(np.float32)[:factors]
                grads, outs = _tensor(grad, length, grad_type), _tensor(out, length, out_type)
                position = others[0] if rule.rounds else 0
                self._kernel.update(grads, state, outs, tuple(scalars), rule=rule, position=position)

        runtime.launch("update", update, [Bytes(address, 8 * count * (1 + columns))], [])

    def _block_sums(self, table: torch.Tensor, sums: torch.Tensor, count: int, **options: Any) -> None:
        dtype, address, to, total = _type(options["dtype"]), table.data_ptr(), sums.data_ptr(), sums.numel()

        def compute() -> None:
            results = _tensor(to, total, torch.float64)
            for place, length, first in self._block_rows(address, count):
                values = _tensor(place, length, dtype)
                for number, block in enumerate(values.split(SUMS_BLOCK)):
                    results[first + number] = self._kernel.sum_of_squares(block.clone())

        runtime.launch("block_sums", compute, [Bytes(address, 32 * count)], [Bytes(to, 8 * total)])

    def _block_fingerprints(self, table: torch.Tensor, sums: torch.Tensor, count: int, **_: Any) -> None:
        address, to, total = table.data_ptr(), sums.data_ptr(), sums.numel()

        def compute() -> None:
            results = _words(to, total).reshape(-1, len(KEYS))
            for place, length, first in self._block_rows(address, count):
                value = self._kernel.fingerprint(_tensor(place, length, torch.bfloat16))
                own = np.frombuffer(value, np.int64).reshape(-1, len(KEYS))
                results[first : first + len(own)] = own

        runtime.launch("block_fingerprints", compute, [Bytes(address, 32 * count)], [Bytes(to, 8 * total)])

    def _block_rows(self, address: int, count: int) -> list[list[int]]:
        rows: list[list[int]] = _words(address, 4 * count)[count:].reshape(count, 3).tolist()
        return rows
