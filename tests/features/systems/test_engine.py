"""Tests of the policies of other systems in the engine: it runs what it can, with the
same bits."""

from __future__ import annotations

import pytest
import torch

from ebbtide.errors import PolicyError
from ebbtide.interleave import InterleavedAdamW
from ebbtide.interleave.policies import POLICIES
from tests.interleave.engine.training import MACHINE


def train(policy: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64).to(torch.bfloat16)
    optimizer = InterleavedAdamW(
        model.parameters(),
        policy=policy,
        subgroup_params=1000,
        machine=MACHINE,
        max_grad_norm=1.0,
    )
    for _ in range(3):
        model(torch.ones(8, 64, dtype=torch.bfloat16)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_engine__runs_deepcompile_with_the_same_bits() -> None:
    ours, zero_offload = train("deepcompile"), train("zero-offload")
    assert all(torch.equal(a, b) for a, b in zip(ours, zero_offload, strict=True))


@pytest.mark.parametrize(
    "name", sorted(name for name, policy in POLICIES.items() if policy.simulation_only)
)
def test_engine__refuses_systems_that_are_only_simulated(name: str) -> None:
    policy = f"{name}:0.5" if name in ("zenflow", "megatron-hybrid") else name
    with pytest.raises(
        PolicyError,
        match=f"policy {policy} can be simulated, by `ebbtide replay`, and not run",
    ) as error:
        train(policy)
    assert "\n" not in str(error.value)
