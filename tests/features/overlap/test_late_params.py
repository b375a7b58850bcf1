"""Everything that uses a parameter before its late update is there waits for it, or
raises."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ebbtide.interleave.engine.devices.emulated import EmulatedDevice
from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.interleaved_adamw import InterleavedAdamW

WIDTH = 16
# Slower than any forward.
_SLOW = 1e5


class _Net(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(inputs)))


def _optimizer(net: nn.Module, **options: Any) -> InterleavedAdamW:
    arguments: dict[str, Any] = {
        "lr": 1e-2,
        "subgroup_params": 100,
        "threads": 1,
        "overlap": "forward",
        "model": net,
    }
    arguments["device"] = EmulatedDevice(None, _SLOW, _SLOW, None)
    return InterleavedAdamW(net.parameters(), policy="pipelined", **arguments | options)


def _step(net: nn.Module, optimizer: InterleavedAdamW) -> float:
    loss = net(torch.ones(2, WIDTH)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)


# Each reaches the memory in another way.
USES: dict[str, Callable[[nn.Parameter], Any]] = {
    "list": lambda weight: torch._foreach_mul([weight], 2.0)[0],
    "keyword": lambda weight: F.linear(torch.ones(1, WIDTH), weight=weight),
    "numpy": lambda weight: torch.from_numpy(weight.detach().numpy()),
    "memory": lambda weight: torch.tensor([], dtype=torch.float32).set_(
        weight.untyped_storage()
    ),
    "dlpack": lambda weight: torch.from_dlpack(weight.detach()),
    "operator of torch.ops": lambda weight: torch.ops.aten.mul(weight, 2),
    "vmap": lambda weight: torch.vmap(lambda row: row.sum())(weight),
    "grad": lambda weight: torch.func.grad(lambda value: value.square().sum())(weight),
    "scripted": lambda weight: torch.jit.script(_double)(weight),
    "autograd.Function": lambda weight: _Double.apply(weight),
    "item": lambda weight: torch.tensor(weight[0, 0].item()),
}


def _double(value: torch.Tensor) -> torch.Tensor:
    return value * 2


class _Double(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_late_params__wait_in_every_use(use: Callable[[nn.Parameter], Any]) -> None:
    def values(**options: Any) -> torch.Tensor:
        torch.manual_seed(0)
        net = _Net()
        optimizer = _optimizer(net, **options)
        try:
            for _ in range(2):
                _step(net, optimizer)
            if options == {}:
                # The update of the last subgroup cannot have ended.
                assert type(net.second.weight) is not nn.Parameter
            return use(net.second.weight).detach().clone()
        finally:
            optimizer.close()

    assert torch.equal(values(), values(overlap="none", model=None))


def test_late_params__have_metadata_and_gradients_without_waiting() -> None:
    net = _Net()
    optimizer = _optimizer(net)
    try:
        _step(net, optimizer)
        weight = net.second.weight
        assert (weight.shape, weight.dtype, weight.requires_grad, weight.is_leaf) == (
            (16, 16),
            torch.float32,
            True,
            True,
        )
        assert weight.grad is None
        assert weight.numel() == weight.size(0) * len(weight) == 256
        weight.grad = None
        weight.requires_grad_(True)
        optimizer.zero_grad()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        assert isinstance(weight, nn.Parameter)
        assert type(weight) is not nn.Parameter
        optimizer.synchronize()
        assert type(weight) is nn.Parameter
    finally:
        optimizer.close()


def test_late_params__raise_for_gradients_of_values_that_nothing_has_waited_for() -> (
    None
):
    """A forward that shows none of its reads, as kernels at fixed addresses: its
    gradients are an error at once."""
    torch.manual_seed(0)
    net = _Net()
    optimizer = _optimizer(net)
    try:
        _step(net, optimizer)
        with torch._C.DisableTorchFunctionSubclass():
            loss = F.linear(torch.ones(1, WIDTH), net.first.weight).sum()
        with pytest.raises(
            EngineError,
            match=(
                r"parameter first.weight has a gradient, but its forward has not "
                r"waited"
            ),
        ):
            loss.backward()
        before = copy.deepcopy(list(net.parameters()))
        net.first.weight.grad = torch.ones(WIDTH, WIDTH)
        # No forward was seen, as when a graph that computes gradients is replayed;
        # deepcopy was a use of all.
        optimizer.step()
        assert not torch.equal(net.first.weight, before[0])
    finally:
        optimizer.close()


def test_step__raises_for_gradients_that_no_backward_has_shown() -> None:
    torch.manual_seed(0)
    net = _Net()
    optimizer = _optimizer(net)
    try:
        for _ in range(2):
            _step(net, optimizer)
        with torch._C.DisableTorchFunctionSubclass():
            net.second.bias.grad = torch.ones(WIDTH)
        for _ in range(2):
            with pytest.raises(
                EngineError,
                match=(
                    r"parameter second.bias has a gradient, but its forward has not "
                    r"waited"
                ),
            ):
                optimizer.step()
        optimizer.zero_grad()
        # Gradients of zero depend on no value: those that are left of parameters that
        # an iteration has not used.
        net.second.bias.grad = torch.zeros(WIDTH)
        optimizer.step()
    finally:
        optimizer.close()


def test_replay__of_a_graph_waits_for_all_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net, replays = _Net(), []
    weights = [param.detach() for param in net.parameters()]
    monkeypatch.setattr(
        torch.cuda.CUDAGraph,
        "replay",
        lambda graph: replays.append(type(net.second.weight)),
    )
    optimizer = _optimizer(net)
    try:
        del weights
        for _ in range(2):
            _step(net, optimizer)
        torch.cuda.CUDAGraph.replay(None)
        assert replays == [nn.Parameter]
        assert not optimizer._runner.is_late
    finally:
        optimizer.close()


def test_step__waits_for_parameters_of_which_the_job_keeps_views() -> None:
    net = _Net()
    view = net.second.weight.detach()
    optimizer = _optimizer(net)
    try:
        for _ in range(3):
            _step(net, optimizer)
        assert optimizer._calls.is_active
        assert type(net.second.weight) is nn.Parameter
        assert type(net.second.bias) is not nn.Parameter
        expected = view.clone()
        optimizer.synchronize()
        assert torch.equal(view, expected)
    finally:
        optimizer.close()
