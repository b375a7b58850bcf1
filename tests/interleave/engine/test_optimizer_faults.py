"""Tests optimizers after failures: gradients that are not finite, and calls of the
hardware that raise."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import pytest
import torch

from ebbtide.interleave.engine.devices.emulated import EmulatedDevice
from ebbtide.interleave.engine.errors import EngineError, UpdateNotStarted
from ebbtide.interleave.engine.interleaved_adamw import InterleavedAdamW
from ebbtide.interleave.engine.numerics.reference import TensorUpdate
from tests.interleave.engine.jobs import ReferenceAdamW, closing
from tests.interleave.engine.states import bits


def gradients(params: list[torch.Tensor], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("policy", ["zero-offload", "interleaved:2", "gpu-only"])
def test_step__refuses_a_gradient_that_is_not_finite_and_changes_nothing(
    policy: str, poison: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    params = [
        torch.nn.Parameter(torch.randn(n, generator=generator).bfloat16())
        for n in (50, 200)
    ]
    reference = ReferenceAdamW([param.detach().clone() for param in params])
    with closing(
        InterleavedAdamW(params, policy=policy, subgroup_params=60, threads=1)
    ) as optimizer:
        for step in range(6):
            gradients(list(params), step)
            gradients(reference.params, step)
            if step in (0, 3):
                assert params[1].grad is not None
                params[1].grad[199] = poison
                with pytest.raises(EngineError, match="not a number"):
                    optimizer.step()
            else:
                optimizer.step()
                reference.step()
            for param, expected in zip(params, reference.params, strict=True):
                assert torch.equal(bits(param.detach()), bits(expected))


class FullHost(EmulatedDevice):
    """A device whose next update cannot start, beside a host of which no more memory
    can be pinned."""

    is_full = False

    def allocate_host(
        self, shape: tuple[int, ...], dtype: torch.dtype, pinned: bool = True
    ) -> torch.Tensor:
        if self.is_full and pinned:
            raise EngineError("host memory cannot be pinned")
        return super().allocate_host(shape, dtype, pinned)

    def update(self, updates: Sequence[TensorUpdate]) -> None:
        if self.is_full:
            raise UpdateNotStarted("refused")
        super().update(updates)


def test_state__is_kept_on_the_host_where_no_more_memory_can_be_pinned() -> None:
    param = torch.nn.Parameter(
        torch.randn(50, generator=torch.Generator().manual_seed(0))
    )
    reference = ReferenceAdamW([param.detach().clone()])
    device = FullHost()
    with (
        contextlib.closing(device),
        closing(
            InterleavedAdamW([param], policy="gpu-only", threads=1, device=device)
        ) as optimizer,
    ):
        for step in range(3):
            gradients([param], step)
            gradients(reference.params, step)
            reference.step()
            device.is_full = step == 1
            with (
                pytest.raises(EngineError, match="completed on the CPU")
                if device.is_full
                else contextlib.nullcontext()
            ):
                optimizer.step()
            assert torch.equal(bits(param.detach()), bits(reference.params[0]))
