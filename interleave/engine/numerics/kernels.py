"""The CPU's update: one pass over memory, by serial loops without the GIL on slices, on threads of our own."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from ebbtide import host_limits
from ebbtide.interleave.engine.numerics.norm import BLOCK, total
from ebbtide.interleave.engine.numerics.reference import Scalars

# Of memory traffic, a parameter, where gradient and parameter have half precision: gradient 2 and state 12 in, state 12
# and parameter 2 out. They bound the speed.
ONE_PASS_BYTES = 28

# Elements of two cache lines of bfloat16: where a tensor begins on a line, no two threads write to the same.
_ALIGNED = 64
# A slice at most: about 10 ms. A thread that shares its core gets fewer of them, and none waits for the GIL often.
_LARGEST = 8 << 20
# A slice at least: below, handing it to a thread costs more than it saves.
_SMALLEST = 16 << 10

# How the compiled loops tell what an array holds.
_BITS = {torch.bfloat16: torch.uint16, torch.float16: torch.int16, torch.float32: torch.float32}


class CpuKernel:
    """The reference's update (reference.py), bit for bit, on so many threads; without a number, on the cores that this
    process may use, shared evenly with the ranks of this host (LOCAL_WORLD_SIZE). OMP_NUM_THREADS does not count:
    torchrun sets it to 1.

    Loops compile on their first call for each combination of types (about a second, once for a machine where numba can
    keep them on disk). The caller's thread waits without the GIL. Calls from several threads share the same pool."""

    def __init__(self, threads: int | None = None) -> None:
        # numba takes long to import, and whoever only describes an update needs none.
        from ebbtide.interleave.engine.numerics import compiled

        self._compiled = compiled
        self.threads = threads or max(1, host_limits.cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        # A thread begins with the flags of the one that makes it, and some libraries make theirs flush subnormals.
        self._pool = ThreadPoolExecutor(
            self.threads, "ebbtide-cpu", initializer=torch.set_flush_denormal, initargs=(False,)
        )

    def update(
        self,
        grad: torch.Tensor,
        master: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        out: torch.Tensor | None,
        scalars: Scalars,
    ) -> None:
        """Update master and moments (fp32) in place and write the parameter, unless `out` is None; returns when all is
        done. All are contiguous CPU tensors of one dimension and length; grad and out are bfloat16, float16 or float32.
        Raises ValueError where they are not."""
        outs = () if out is None else (out,)
        check("cpu", (grad, *outs), (master, exp_avg, exp_avg_sq))
        arrays = [_array(tensor) for tensor in (grad, master, exp_avg, exp_avg_sq, *outs)]
        loop = self._compiled.update if outs else self._compiled.update_state

        def part(begin: int, end: int) -> None:
            loop(*(array[begin:end] for array in arrays), *scalars)

        self._on_slices(part, len(master), _ALIGNED)

    def sum_of_squares(self, gradient: torch.Tensor) -> float:
        """`norm.sum_of_squares`, bit for bit, of a contiguous gradient of one dimension. Finite exactly where all of it
        is."""
        check("cpu", (gradient,))
        values = _array(gradient)
        sums = np.empty(-(-len(values) // BLOCK))

        def part(begin: int, end: int) -> None:
            self._compiled.block_sums(values[begin:end], sums[begin // BLOCK : -(-end // BLOCK)])

        self._on_slices(part, len(values), BLOCK)
        return total(sums)

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    def _on_slices(self, part: Callable[[int, int], None], length: int, unit: int) -> None:
        """Call part(begin, end) for slices of whole units, on the pool's threads alone: their flags are known."""
        size = min(max(length // self.threads, _SMALLEST), _LARGEST)
        size = -(-size // unit) * unit
        begins = range(0, length, size)
        list(self._pool.map(part, begins, (min(begin + size, length) for begin in begins)))


def check(device: str, stored: Sequence[torch.Tensor], state: Sequence[torch.Tensor] = ()) -> None:
    """Raise ValueError for what a kernel cannot take: it would read and write beyond it. stored: in any precision of
    parameters; state: in fp32."""
    tensors = (*stored, *state)
    if any(tensor.dtype not in _BITS for tensor in stored) or any(tensor.dtype != torch.float32 for tensor in state):
        raise ValueError("gradient and parameter must be bfloat16, float16 or float32, master and moments float32")
    if any(tensor.dim() != 1 or not tensor.is_contiguous() or len(tensor) != len(tensors[0]) for tensor in tensors):
        raise ValueError("gradient, master, moments and parameter must be contiguous, of one dimension and length")
    if any(tensor.device.type != device or tensor.device != tensors[0].device for tensor in tensors):
        raise ValueError(f"gradient, master, moments and parameter must be on one device, a {device}")


def _array(tensor: torch.Tensor) -> Any:
    """The same memory, as the compiled loops take it."""
    return tensor.detach().view(_BITS[tensor.dtype]).numpy()
