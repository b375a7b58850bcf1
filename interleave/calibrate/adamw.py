"""AdamW over one subgroup: half-precision gradient in, fp32 master and moments updated, half-precision parameter
out."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ebbtide.interleave.engine.numerics.host_arrays import row_stride
from ebbtide.interleave.engine.numerics.kernels import CpuKernel
from ebbtide.interleave.engine.numerics.reference import Hyper
from ebbtide.state_bytes import GRAD_BYTES, PARAM_BYTES, STATE_BYTES

_FP32_GRAD_BYTES = 4
# Memory per parameter of the larger of the kernels below: state, gradient in both precisions, parameter.
KERNEL_BYTES = STATE_BYTES + GRAD_BYTES + _FP32_GRAD_BYTES + PARAM_BYTES
# Memory per parameter of a cast: fp32 and bf16.
CAST_BYTES = 6
_HYPER = Hyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01)

UpdateCall = Callable[[], object]


class TorchAdamW:
    """torch's fused AdamW with the casts that it needs. On a GPU a call only launches the kernels.

    Args:
        params: Number of parameters.
        device: Device of all tensors.
        threads: CPU threads of torch; not used on a GPU.
    """

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
        """The fp32 master and moments; valid after the first call, which creates the moments."""
        moments = self._optimizer.state[self.master]
        return [self.master.detach(), moments["exp_avg"], moments["exp_avg_sq"]]


class OnePassAdamW:
    """The engine's own CPU kernel.

    Args:
        params: Number of parameters.
        threads: CPU threads of the kernel.

    Attributes:
        state: The fp32 master and moments, of shape (3, params).
        new_state: What `update_beside` made of them; None before its first call.
    """

    def __init__(self, params: int, threads: int) -> None:
        self.gradient = torch.full((params,), 1e-3, dtype=torch.bfloat16)
        self.half = torch.ones_like(self.gradient)
        # Written, not only allocated: the first access to a page costs time.
        self.state = torch.empty((3, row_stride(params)))[:, :params].fill_(0.0)
        self.state[0] = 1.0
        self.new_state: torch.Tensor | None = None
        self._remainders: torch.Tensor | None = None
        self._kernel = CpuKernel(threads)
        self._steps = 0

    def __call__(self) -> None:
        self._steps += 1
        scalars = _HYPER.scalars(self._steps)
        master, exp_avg, exp_avg_sq = self.state
        self._kernel.update(self.gradient, master, exp_avg, exp_avg_sq, self.half, scalars)

    def update_beside(self) -> None:
        """Make the next step out of place: write the new state, for which the first call allocates memory.

        The state stays as it is, so that the next step stays the same."""
        if self.new_state is None:
            self.new_state = torch.empty((3, row_stride(len(self.half))))[:, : len(self.half)].fill_(0.0)
        ranges = [(0, len(self.half), _HYPER.scalars(self._steps + 1))]
        self._kernel.update_beside(self.gradient, self.state, self.new_state, self.half, ranges)

    def update_remainders(self) -> None:
        """Make a step whose masters are remainders, for which the first call allocates memory. The step is another one
        each time, of the same moments and parameters."""
        self._steps += 1
        if self._remainders is None:
            self._remainders = torch.zeros(len(self.half), dtype=torch.int16)
        _, exp_avg, exp_avg_sq = self.state
        self._kernel.update(
            self.gradient, self._remainders, exp_avg, exp_avg_sq, self.half, _HYPER.scalars(self._steps)
        )


def cpu_kernels(params: int, threads: int) -> dict[str, Callable[[], UpdateCall]]:
    """Return a factory for each CPU kernel by its name in machine files."""
    return {
        "torch AdamW(fused=True) and its casts": lambda: TorchAdamW(params, torch.device("cpu"), threads),
        "one pass by numba": lambda: OnePassAdamW(params, threads),
    }
