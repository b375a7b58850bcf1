"""Muon: its bits on the CPU, and its error against double precision."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ebbtide.features.matrices import matrices
from ebbtide.interleave import InterleavedOptimizer
from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.numerics import reference
from ebbtide.interleave.engine.numerics.kernels import CpuKernel
from ebbtide.interleave.engine.rules import find_rule
from ebbtide.interleave.engine.rules.rule import UpdateRange
from tests.conftest import FUZZ, slow_case
from tests.interleave.engine.states import bits
from tests.interleave.engine.training import MACHINE

MUON = find_rule("muon")


@pytest.mark.parametrize(
    "shape", [(1, 1), (3, 50), (50, 3), (70, 70), (33, 280), (300, 41), (8, 257)]
)
@pytest.mark.parametrize("out_of_place", [slow_case(False), True])
def test_kernel__gives_the_bits_of_the_reference(
    kernel: CpuKernel, shape: tuple[int, int], out_of_place: bool
) -> None:
    generator = torch.Generator().manual_seed(shape[0])
    count = shape[0] * shape[1]
    gradient, state = (
        torch.randn(count, generator=generator).bfloat16(),
        torch.randn(2, count, generator=generator),
    )
    expected, out, other = (
        list(state.clone()),
        torch.zeros(count).bfloat16(),
        torch.zeros(count).bfloat16(),
    )
    scalars = MUON.scalars({**MUON.defaults, "lr": 0.02}, 1, 0.7)
    reference.update(gradient, expected, other, scalars, MUON, 0, shape)
    rows = list(state)
    if out_of_place:
        rows = list(torch.empty_like(state))
        kernel.update_beside(
            gradient,
            state,
            rows,
            out,
            [UpdateRange(0, count, scalars, 0, shape)],
            rule=MUON,
        )
    else:
        kernel.update(gradient, rows, out, scalars, rule=MUON, shape=shape)
    for row, other_row in zip((*rows, out), (*expected, other), strict=True):
        assert torch.equal(bits(row), bits(other_row))


def test_kernel__keeps_subnormals_if_the_caller_flushes_them(kernel: CpuKernel) -> None:
    gradient, scalars = (
        torch.full((12,), 1e-40),
        MUON.scalars({**MUON.defaults, "eps": 0.0, "lr": 1.0}, 1),
    )
    gradient[::5] = 3e-40
    expected, state = (
        [torch.ones(12), torch.zeros(12)],
        [torch.ones(12), torch.zeros(12)],
    )
    reference.update(gradient, expected, None, scalars, MUON, 0, (3, 4))
    assert expected[0].isfinite().all()
    assert torch.set_flush_denormal(True)
    try:
        kernel.update(gradient, state, None, scalars, rule=MUON, shape=(3, 4))
    finally:
        torch.set_flush_denormal(False)
    for row, other in zip(state, expected, strict=True):
        assert torch.equal(bits(row), bits(other))


def test_multiply__is_a_product() -> None:
    generator = np.random.default_rng(0)
    a, b = (
        generator.standard_normal(shape).astype(np.float32)
        for shape in ((20, 30), (30, 25))
    )
    assert np.allclose(matrices.multiply(a, b), a.astype(np.float64) @ b, atol=1e-5)


def in_double_precision(gradient: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
    """Return the direction of a first step by the formulas of torch.optim.Muon."""
    wide = gradient.double()
    moment = wide * (1 - group["momentum"])
    x = wide + group["momentum"] * (moment - wide)
    x = x.T if len(x) > x.shape[1] else x
    x = x / x.norm().clamp(min=group["eps"])
    a, b, c = group["ns_coefficients"]
    for _ in range(group["ns_steps"]):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if len(gradient) > gradient.shape[1] else x


@pytest.mark.parametrize("shape", [(60, 90), (90, 60), (64, 64)])
def test_muon__is_no_less_exact_than_that_of_torch(shape: tuple[int, int]) -> None:
    """Torch's has products in bfloat16."""
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("needs torch 2.9")
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(shape, generator=generator)
    group = {**MUON.defaults, "lr": 1.0, "weight_decay": 0.0}
    errors = []
    ratio = max(1.0, shape[0] / shape[1]) ** 0.5
    expected = -ratio * in_double_precision(gradient, group)
    for optimizer_of in (
        lambda param: torch.optim.Muon([param], lr=1.0, weight_decay=0.0),
        lambda param: InterleavedOptimizer(
            [param], "muon", lr=1.0, weight_decay=0.0, policy="zero-offload"
        ),
    ):
        param = torch.nn.Parameter(torch.zeros(shape))
        param.grad = gradient.clone()
        optimizer_of(param).step()
        errors.append(
            ((param.detach().double() - expected).norm() / expected.norm()).item()
        )
    assert errors[1] < 1e-5 < 1e-3 < errors[0] < 0.1


class Net(torch.nn.Module):  # type: ignore[misc]
    """Embedding, hidden matrices and a head, as people train them with Muon."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(50, 24)
        self.hidden = torch.nn.ModuleList(torch.nn.Linear(24, 24) for _ in range(3))
        self.head = torch.nn.Linear(24, 50)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.hidden:
            x = x + torch.tanh(layer(x))
        return self.head(x)

    def groups(self) -> list[dict[str, Any]]:
        matrices = [layer.weight for layer in self.hidden]
        others = [
            param
            for param in self.parameters()
            if all(param is not matrix for matrix in matrices)
        ]
        return [
            {"params": matrices, "lr": 0.02},
            {"params": others, "rule": "adamw", "lr": 3e-3},
        ]


def train(**options: Any) -> tuple[list[float], list[torch.Tensor]]:
    net = Net()
    model = net if options.get("overlap") in ("forward", "both") else None
    optimizer = InterleavedOptimizer(
        net.groups(), "muon", machine=MACHINE, model=model, **options
    )
    generator, losses = torch.Generator().manual_seed(1), []
    for _ in range(100 if FUZZ > 1 else 30):
        tokens = torch.randint(0, 50, (4, 9), generator=generator)
        loss = torch.nn.functional.cross_entropy(
            net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    optimizer.close()
    return losses, [param.detach().clone() for param in net.parameters()]


def test_muon__refuses_matrices_in_another_order_of_memory() -> None:
    with pytest.raises(EngineError, match="is no matrix in the order of its memory"):
        InterleavedOptimizer([torch.nn.Parameter(torch.zeros(3, 4).T)], "muon")
