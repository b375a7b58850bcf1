"""The update on the CPU: one pass over memory, by serial loops without the GIL, on slices, in a pool of threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from ebbtide import host_limits
from ebbtide.interleave.engine.numerics.norm import BLOCK, total
from ebbtide.interleave.engine.numerics.reference import Hyper, Scalars
from ebbtide.state_bytes import GRAD_BYTES, PARAM_BYTES, STATE_BYTES

# Memory traffic per parameter if gradient and parameter have half precision: read gradient 2 and state 12, write state
# 12 and parameter 2. It limits the speed.
ONE_PASS_BYTES = GRAD_BYTES + 2 * STATE_BYTES + PARAM_BYTES

# Slices are multiples of this: two cache lines of bfloat16 elements. If a tensor starts at a cache line, no two threads
# write to the same line.
_ALIGNMENT = 64
# Maximum elements of a slice: about 10 ms. A thread that shares its core gets fewer slices, and threads rarely wait for
# the GIL.
_MAX_SLICE = 8 << 20
# Minimum elements of a slice: for smaller ones, passing it to a thread costs more than it saves.
_MIN_SLICE = 16 << 10

# The types by which the compiled loops recognize what an array contains.
_BITS = {torch.bfloat16: torch.uint16, torch.float16: torch.int16, torch.float32: torch.float32}


class CpuKernel:
    """The update of reference.py on the CPU, with the same bits.

    Loops compile on their first call for each combination of types (about a second; once per machine if numba can cache
    them on disk). The calling thread waits without the GIL. Calls from several threads share one pool.

    Args:
        threads: Number of threads. By default the cores that this process may use, shared evenly with the other ranks
            of this host (LOCAL_WORLD_SIZE). OMP_NUM_THREADS is ignored, because torchrun sets it to 1.
    """

    def __init__(self, threads: int | None = None) -> None:
        # numba takes long to import, and code that only describes updates does not need it.
        from ebbtide.interleave.engine.numerics import compiled

        self._compiled = compiled
        self.threads = threads or max(1, host_limits.cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        # A new thread inherits the flags of the thread that starts it, and some libraries set a flag that flushes
        # subnormals.
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
        share: float = 1.0,
    ) -> None:
        """Update master and moments in place and write the parameter; return when all is done.

        All tensors are contiguous CPU tensors with one dimension and the same length.

        Args:
            grad: Gradient, bfloat16, float16 or float32.
            master: Master weights, fp32.
            exp_avg: First moment, fp32.
            exp_avg_sq: Second moment, fp32.
            out: Parameter to write, bfloat16, float16 or float32; None to only update the state.
            scalars: The factors of the step.
            share: The share of the threads to use, at least one: the others leave the host's memory to copies.

        Raises:
            ValueError: If a tensor is of another kind.
        """
        outs = () if out is None else (out,)
        check_tensors("cpu", (grad, *outs), (master, exp_avg, exp_avg_sq))
        arrays = [_array(tensor) for tensor in (grad, master, exp_avg, exp_avg_sq, *outs)]
        loop = self._compiled.update if outs else self._compiled.update_state

        def part(begin: int, end: int) -> None:
            loop(*(array[begin:end] for array in arrays), *scalars)

        self._on_slices(part, len(master), _ALIGNMENT, max(1, round(share * self.threads)))

    def sum_of_squares(self, gradient: torch.Tensor) -> float:
        """Return `norm.sum_of_squares` of a contiguous gradient with one dimension, with the same bits.

        It is finite exactly if all elements are."""
        check_tensors("cpu", (gradient,))
        values = _array(gradient)
        sums = np.empty(-(-len(values) // BLOCK))

        def part(begin: int, end: int) -> None:
            self._compiled.block_sums(values[begin:end], sums[begin // BLOCK : -(-end // BLOCK)])

        self._on_slices(part, len(values), BLOCK, self.threads)
        return total(sums)

    def warm_up(self, dtypes: Collection[tuple[torch.dtype, torch.dtype]]) -> None:
        """Compile the loops for these dtypes of gradient and parameter, and run them on one element."""
        state = torch.zeros((3, 1), dtype=torch.float32, device="cpu")
        for grad_dtype, dtype in dtypes:
            grad, out = (torch.zeros(1, dtype=kind, device="cpu") for kind in (grad_dtype, dtype))
            for target in (out, None):
                self.update(grad, state[0], state[1], state[2], target, Hyper().scalars(1))
            self.sum_of_squares(grad)
            self.fingerprint(out)

    def fingerprint(self, values: torch.Tensor) -> int:
        """Return `fingerprint.fingerprint` of a contiguous tensor with one dimension, by the calling thread."""
        check_tensors("cpu", (values,))
        return int(self._compiled.fingerprint(values.detach().view(torch.uint16).numpy()))

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    def _on_slices(self, part: Callable[[int, int], None], length: int, unit: int, threads: int) -> None:
        """Call part(begin, end) for slices of whole units, only on threads of the pool, because their flags are set."""
        size = min(max(length // self.threads, _MIN_SLICE), _MAX_SLICE)
        size = -(-size // unit) * unit
        remaining = iter(range(0, length, size))

        def run_slices() -> None:
            for begin in remaining:
                part(begin, min(begin + size, length))

        for running in [self._pool.submit(run_slices) for _ in range(threads)]:
            running.result()


def check_tensors(device: str, stored: Sequence[torch.Tensor], state: Sequence[torch.Tensor] = ()) -> None:
    """Check the tensors of a kernel call, since a kernel would read and write beyond tensors that do not match.

    Args:
        device: The type of the device that they must be on.
        stored: Gradient and parameter, in any precision of parameters.
        state: Master and moments, in fp32.

    Raises:
        ValueError: If a tensor is of another kind.
    """
    tensors = (*stored, *state)
    if any(tensor.dtype not in _BITS for tensor in stored) or any(tensor.dtype != torch.float32 for tensor in state):
        raise ValueError("gradient and parameter must be bfloat16, float16 or float32, master and moments float32")
    if any(tensor.dim() != 1 or not tensor.is_contiguous() or len(tensor) != len(tensors[0]) for tensor in tensors):
        raise ValueError("gradient, master, moments and parameter must be contiguous, with one dimension and length")
    if any(tensor.device.type != device or tensor.device != tensors[0].device for tensor in tensors):
        raise ValueError(f"gradient, master, moments and parameter must be on one {device} device")


def _array(tensor: torch.Tensor) -> Any:
    """Return the same memory as an array for the compiled loops."""
    return tensor.detach().view(_BITS[tensor.dtype]).numpy()
