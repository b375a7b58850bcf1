"""Weights that are streamed: bits, memory, optimizers and state dicts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ebbtide.interleave import InterleavedAdamW, offload_activations, stream_weights
from ebbtide.interleave.engine.devices.emulated import EmulatedDevice
from ebbtide.interleave.engine.errors import DeviceMemoryError, EngineError
from tests.interleave.engine.layers.test_activations import LAYER_BYTES, LENGTH, WIDTH, same, stack
from tests.interleave.engine.training import MACHINE

# Weights and bias of one layer.
WEIGHT_BYTES = 4 * (WIDTH * WIDTH + WIDTH)


def trained(model: Any, device: EmulatedDevice | None = None, interleaved: bool = False, steps: int = 4) -> list[Any]:
    """Return losses, gradients of the last step and parameters."""
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    if interleaved:
        optimizer = InterleavedAdamW(
            model.parameters(), lr=0.01, policy="pipelined", machine=MACHINE, subgroup_params=1500, device=device
        )
    results = []
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss = model(torch.randn(LENGTH, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            results += [loss.detach(), model(torch.ones(2, WIDTH))]
    if interleaved:
        optimizer.close()
    return [*results, *(param.grad for param in model.parameters()), *(param.detach() for param in model.parameters())]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("layers", [2.1, 1.1, 9])
def test_stream_weights__has_the_bits_of_the_plain_job_within_the_budget(layers: float, interleaved: bool) -> None:
    expected, model = trained(stack(), EmulatedDevice(), interleaved), stack()
    device = EmulatedDevice(h2d_bytes_per_s=2e7, d2h_bytes_per_s=2e7)
    with stream_weights(model, memory_budget=layers * WEIGHT_BYTES, device=device) as streamed:
        assert same(trained(model, device, interleaved), expected)
        assert not streamed.kept
        # One layer is copied while another one computes.
        assert min(layers, 2) // 1 * WEIGHT_BYTES <= streamed.peak_bytes <= layers * WEIGHT_BYTES
        assert streamed.used_bytes == 0
    other = stack()
    other.load_state_dict(model.state_dict())
    assert same(trained(model), trained(other))


@pytest.mark.parametrize("layers", [2.2, 4.2])
@pytest.mark.parametrize("rate", [1e5, None])
def test_stream_weights__together_with_activations(layers: float, rate: float | None) -> None:
    expected, model = trained(stack(), steps=5), stack()
    capacity = layers * LAYER_BYTES + 2.1 * WEIGHT_BYTES
    device = EmulatedDevice(capacity_bytes=capacity, h2d_bytes_per_s=rate and 100 * rate, d2h_bytes_per_s=rate)
    with (
        stream_weights(model, memory_budget=2.1 * WEIGHT_BYTES, device=device) as streamed,
        offload_activations(model, memory_budget=layers * LAYER_BYTES, device=device) as activations,
    ):
        assert same(trained(model, steps=5), expected)
        assert device.peak_bytes <= capacity
        assert set(activations.choices.values()) - {"keep"}
        assert streamed.used_bytes == activations.used_bytes == 0
    assert "forward" not in vars(model.layers[0])


def test_stream_weights__shared_weights_stay_and_are_named() -> None:
    def tied() -> Any:
        model = stack()
        model.layers[3].linear.weight = model.inputs.weight
        return model

    expected, model = trained(tied()), tied()
    with stream_weights(model, device=EmulatedDevice()) as streamed:
        assert streamed.kept == ["layers.3.linear.weight"]
        assert same(trained(model), expected)


def test_stream_weights__changed_weights_are_an_error_before_the_backward_uses_them() -> None:
    model = stack()
    with stream_weights(model, device=EmulatedDevice()):
        loss = model(torch.randn(LENGTH, WIDTH)).sum()
        with torch.no_grad():
            model.layers[4].linear.weight.mul_(2)
        with pytest.raises(EngineError, match=r"layer layers\.4: a saved tensor .* modified in place"):
            loss.backward()
        assert all(param.grad is None for param in model.layers[3].parameters())


def test_stream_weights__budget_below_one_layer_is_an_error() -> None:
    model = stack()
    error = pytest.raises(DeviceMemoryError, match=r"layer layers\.0: weights need")
    with stream_weights(model, memory_budget=100, device=EmulatedDevice()), error:
        model(torch.randn(LENGTH, WIDTH))


def test_stream_weights__goes_on_after_an_error() -> None:
    expected, model = trained(stack()), stack()

    def fail(_: Any) -> None:
        raise ValueError("broken")

    with stream_weights(model, memory_budget=2.1 * WEIGHT_BYTES, device=EmulatedDevice()) as streamed:
        model.layers[2].after = fail
        with pytest.raises(ValueError, match="broken"):
            model(torch.randn(LENGTH, WIDTH))
        model.layers[2].after = torch.is_tensor
        assert same(trained(model), expected)
        assert streamed.used_bytes == 0


def test_stream_weights__comes_before_activations() -> None:
    model = stack()
    with offload_activations(model), pytest.raises(EngineError, match="stream weights before"):
        stream_weights(model)
