"""Calls of a step to its device: each is a launch or two on a GPU, and waiting for a
result stops the job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch

from ebbtide.interleave.engine.devices.emulated import EmulatedDevice
from ebbtide.interleave.engine.interleaved_adamw import InterleavedAdamW
from ebbtide.interleave.engine.numerics.reference import TensorUpdate
from ebbtide.interleave.engine.params.exchange import Exchange
from ebbtide.interleave.engine.params.gradients import GradientNorm


class CountingDevice(EmulatedDevice):
    """An emulated device that counts calls, and the order in which results are waited
    for."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.waits: list[int] = []

    def update(self, updates: Sequence[TensorUpdate]) -> None:
        self.calls["update"] += 1
        super().update(updates)

    def sums_of_squares(
        self, gradients: Sequence[torch.Tensor]
    ) -> Callable[[], list[float]]:
        self.calls["sums_of_squares"] += 1
        number, wait = self.calls["sums_of_squares"], super().sums_of_squares(gradients)

        def results() -> list[float]:
            self.waits.append(number)
            return wait()

        return results

    def fingerprint(self, values: Sequence[torch.Tensor]) -> Callable[[], list[bytes]]:
        self.calls["fingerprint"] += 1
        return super().fingerprint(values)


@pytest.mark.parametrize("gradients", ["kept", "streamed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_step__of_many_parameters_calls_the_device_once_for_each_subgroup_and_result(
    gradients: str, dtype: torch.dtype
) -> None:
    device = CountingDevice()
    params = [
        torch.nn.Parameter(torch.ones(10 + index % 7, dtype=dtype))
        for index in range(120)
    ]
    optimizer = InterleavedAdamW(
        params,
        policy="gpu-only",
        subgroup_params=300,
        gradients=gradients,
        device=device,
        max_grad_norm=1.0,
    )
    subgroups = -(-sum(map(torch.numel, params)) // 300)
    for step in range(2):
        device.calls.clear()
        device.waits.clear()
        torch.stack([param.sum() for param in params]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        # The first step does not know yet how many backwards there are.
        sums = len(params) if gradients == "streamed" and step else 1
        # On the device nothing has a value of a parameter that is its own master.
        fingerprints = {} if dtype == torch.float32 else {"fingerprint": 2}
        assert device.calls == {
            "update": subgroups,
            "sums_of_squares": sums,
            **fingerprints,
        }
        # The last comes first: then there is nothing to wait for in the others.
        assert device.waits == list(range(sums, 0, -1))
    optimizer.close()
    device.close()


def test_gradient_norm__is_that_of_all_gradients_however_they_are_added() -> None:
    params = [torch.full((length,), 2.0) for length in (3, 0, 5, 1, 7)]
    device = CountingDevice()
    for parts in ([[0, 1, 2, 4]], [[4], [0, 2], [1]]):
        norm = GradientNorm(device, Exchange(), max_norm=3.0)
        for indices in parts:
            norm.add_all({index: params[index] for index in indices})
        # Fifteen elements of 2: the norm is the root of 60.
        assert norm.scale_factor(params) == pytest.approx(3.0 / 60**0.5, rel=1e-6)
        # Each step begins anew; nothing was added for it.
        assert norm.scale_factor(params) == 1.0
    norm.add_all({0: torch.full((3,), float("inf"))})
    assert norm.scale_factor(params) is None
    norm.add_all({0: torch.full((3,), float("inf"))})
    norm.clear()
    assert norm.scale_factor(params) == 1.0
    device.close()
