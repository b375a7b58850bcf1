"""AdamW over one subgroup, as fast as what is installed can do it: half-precision gradient in, fp32 master and moments
updated, half-precision parameter out."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

# Bytes that one pass reads and writes in memory, a parameter: gradient 2 and state 12 in, state 12 and parameter 2 out.
ONE_PASS_BYTES = 28
# What the larger of the kernels below keeps, a parameter: state 12, the gradient in both precisions, the parameter.
KEPT_BYTES = 20
_LR, _BETA1, _BETA2, _EPS, _DECAY = 1e-3, 0.9, 0.999, 1e-8, 0.01

Step = Callable[[], object]


class TorchAdamW:
    """torch's fused AdamW, with the casts that it needs around it. On a GPU a call only launches it."""

    def __init__(self, params: int, device: torch.device, threads: int = 1) -> None:
        if device.type == "cpu":
            torch.set_num_threads(threads)
        self.gradient = torch.full((params,), 1e-3, dtype=torch.bfloat16, device=device)
        self.half = torch.ones_like(self.gradient)
        self.master = torch.ones(params, device=device)
        self.master.grad = torch.ones_like(self.master)
        self._optimizer = torch.optim.AdamW(
            [self.master], lr=_LR, betas=(_BETA1, _BETA2), eps=_EPS, weight_decay=_DECAY, fused=True
        )

    def __call__(self) -> None:
        assert self.master.grad is not None
        self.master.grad.copy_(self.gradient)
        self._optimizer.step()
        self.half.copy_(self.master)

    @property
    def state(self) -> list[torch.Tensor]:
        """The fp32 master and moments, once a step has made them."""
        moments = self._optimizer.state[self.master]
        return [self.master.detach(), moments["exp_avg"], moments["exp_avg_sq"]]


class NumbaAdamW:
    """One pass by a serial kernel without the GIL over slices, a thread for each. bfloat16 are kept as their bits."""

    def __init__(self, params: int, threads: int) -> None:
        self.gradient = torch.full((params,), 1e-3, dtype=torch.bfloat16).view(torch.uint16).numpy()
        self.half = np.zeros(params, np.uint16)
        self.master = np.ones(params, np.float32)
        # Written, not only asked for: pages that nobody has touched cost their first user.
        self.moments = np.full((2, params), 0.0, np.float32)
        self._kernel = _compiled()
        edges = [params * number // threads for number in range(threads + 1)]
        self._slices = [slice(a, b) for a, b in itertools.pairwise(edges)]
        self._pool = ThreadPoolExecutor(threads)
        self._steps = 0

    def __call__(self) -> None:
        self._steps += 1
        c1, c2 = 1 - _BETA1**self._steps, 1 - _BETA2**self._steps
        values = (_BETA1, _BETA2, _EPS, 1 - _LR * _DECAY, _LR / c1, 1 / c2**0.5)
        scalars = tuple(np.float32(value) for value in values)
        list(self._pool.map(lambda part: self._slice(part, scalars), self._slices))

    def _slice(self, part: slice, scalars: tuple[np.float32, ...]) -> None:
        first, second = self.moments
        arrays = (self.gradient, self.master, first, second, self.half)
        self._kernel(*(array[part] for array in arrays), *scalars)


def cpu_kernels(params: int, threads: int) -> dict[str, Callable[[], Step]]:
    """The kernels that can run here, by what to call them; each is made when it is called."""
    cpu = torch.device("cpu")
    found: dict[str, Callable[[], Step]] = {
        "torch AdamW(fused=True) and its casts": lambda: TorchAdamW(params, cpu, threads),
    }
    if importlib.util.find_spec("numba") is not None:
        found["one pass by numba"] = lambda: NumbaAdamW(params, threads)
    return found


@functools.cache
def _compiled() -> Any:
    numba = importlib.import_module("numba")
    return numba.njit(nogil=True, error_model="numpy")(_one_pass)


def _one_pass(  # type: ignore[no-untyped-def]
    gradient, master, first, second, half, beta1, beta2, eps, kept, rate, root
):  # pragma: no cover (compiled)
    one = np.float32(1)
    for i in range(master.size):
        g = np.uint32(np.uint32(gradient[i]) << np.uint32(16)).view(np.float32)
        m = beta1 * first[i] + (one - beta1) * g
        v = beta2 * second[i] + (one - beta2) * g * g
        p = kept * master[i] - rate * m / (np.sqrt(v) * root + eps)
        first[i] = m
        second[i] = v
        master[i] = p
        # To nearest, ties to even; what is not a number does not occur here.
        bits = np.float32(p).view(np.uint32)
        half[i] = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
