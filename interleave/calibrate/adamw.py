"""AdamW over one subgroup: half-precision gradient in, fp32 master and moments updated, half-precision parameter
out."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ebbtide.interleave.engine.numerics.kernels import CpuKernel
from ebbtide.interleave.engine.numerics.reference import Hyper

# What the larger of the kernels below keeps, a parameter: state 12, the gradient in both precisions, the parameter.
KEPT_BYTES = 20
_HYPER = Hyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01)

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
            [self.master],
            lr=_HYPER.lr,
            betas=(_HYPER.beta1, _HYPER.beta2),
            eps=_HYPER.eps,
            weight_decay=_HYPER.weight_decay,
            fused=True,
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


class OnePassAdamW:
    """The engine's own kernel."""

    def __init__(self, params: int, threads: int) -> None:
        self.gradient = torch.full((params,), 1e-3, dtype=torch.bfloat16)
        self.half = torch.ones_like(self.gradient)
        self.master = torch.ones(params)
        # Written, not only asked for: pages that nobody has touched cost their first user.
        self._first, self._second = torch.full((params,), 0.0), torch.full((params,), 0.0)
        self._kernel = CpuKernel(threads)
        self._steps = 0

    def __call__(self) -> None:
        self._steps += 1
        scalars = _HYPER.scalars(self._steps)
        self._kernel.update(self.gradient, self.master, self._first, self._second, self.half, scalars)


def cpu_kernels(params: int, threads: int) -> dict[str, Callable[[], Step]]:
    """The kernels that can run here, by what to call them; each is made when it is called."""
    return {
        "torch AdamW(fused=True) and its casts": lambda: TorchAdamW(params, torch.device("cpu"), threads),
        "one pass by numba": lambda: OnePassAdamW(params, threads),
    }
