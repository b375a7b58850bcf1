"""NaN with any payload in parameters: the same bits under every policy, and kept where
nothing is updated."""

from __future__ import annotations

import pytest
import torch

from ebbtide.interleave import InterleavedAdamW
from ebbtide.interleave.engine.devices.emulated import EmulatedDevice
from tests.interleave.engine.states import bits
from tests.interleave.engine.training import MACHINE

LENGTH = 300


def with_nan(dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    values = torch.randn(LENGTH, generator=generator).to(dtype)
    # All bits of some elements are set, and all but the first mantissa bits of others.
    bits(values)[::7] = -1
    bits(values)[3::11] = bits(torch.tensor([torch.inf], dtype=dtype)) + 1
    return values


def updated(policy: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the bits of parameters: one that was updated, and one that was not before
    and after."""
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(with_nan(dtype, generator)) for _ in range(2)]
    before = bits(params[1].detach()).clone()
    optimizer = InterleavedAdamW(
        params,
        lr=0.1,
        policy=policy,
        machine=MACHINE,
        subgroup_params=LENGTH,
        device=EmulatedDevice(),
    )
    params[0].grad = torch.randn(LENGTH, generator=generator).to(dtype)
    optimizer.step()
    optimizer.close()
    return [*(bits(param.detach()) for param in params), before]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_step__writes_the_same_nan_under_every_policy(dtype: torch.dtype) -> None:
    expected = updated("gpu-only", dtype)
    assert torch.equal(expected[1], expected[2])
    for policy in ("zero-offload", "interleaved:2"):
        assert all(map(torch.equal, updated(policy, dtype), expected))
