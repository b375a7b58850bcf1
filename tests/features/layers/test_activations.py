"""Activations of layers that a plan moves: choices, memory, errors, and what is left
behind."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from ebbtide.features.layers.engine import orders
from ebbtide.features.layers.engine.moving import MovedLayers
from ebbtide.features.layers.engine.orders import ONE_AT_A_TIME
from ebbtide.interleave import offload_activations
from ebbtide.interleave.engine.devices.emulated import EmulatedDevice
from ebbtide.interleave.engine.errors import DeviceMemoryError, EngineError
from tests.features.layers.stacks import LAYER_BYTES, LENGTH, WIDTH, same, stack, train


def offloaded(
    model: nn.Module, layers: float | None = None, **rates: float
) -> MovedLayers:
    """Offload activations within the memory of some layers."""
    budget = None if layers is None else layers * LAYER_BYTES
    return offload_activations(
        model, memory_budget=budget, device=EmulatedDevice(**rates)
    )


@pytest.mark.parametrize("layers", [None, 9, 3.2, 2.2, 1.2])
def test_offload_activations__has_the_bits_of_the_plain_job_within_the_budget(
    layers: float | None,
) -> None:
    expected, model = train(stack(), 5), stack()
    with offloaded(model, layers) as activations:
        assert same(train(model, 5), expected)
        # What is compiled and imported first leaves frames in cycles of references.
        gc.collect()
        assert activations.used_bytes == 0
        if layers is not None:
            assert 0 < activations.peak_bytes <= layers * LAYER_BYTES
        choices = set(activations.choices.values())
    assert (
        choices == {"keep"}
        if layers in (None, 9)
        else choices > {"keep"} or choices == {"recompute"}
    )
    assert "forward" not in vars(model.layers[0])


def test_offload_activations__offloads_inputs_of_what_it_recomputes() -> None:
    expected, peaks = train(stack(8), 5), []
    for kind in ("recompute", "recompute-offload"):
        model, budget = stack(8), 8 * LAYER_BYTES
        with offload_activations(
            model, memory_budget=budget, device=EmulatedDevice(), activations=kind
        ) as one:
            assert same(train(model, 5), expected)
            # The last ones stay in their slots.
            assert set(one.choices.values()) == {kind, "recompute"}
            assert one.used_bytes == 0
            one._mover.transfers.memory.peak_bytes = 0
            train(model)
            peaks.append(one.peak_bytes)
    assert peaks[1] < peaks[0]


def test_offload_activations__copies_nothing_where_the_memory_suffices() -> None:
    model, device = stack(), EmulatedDevice(capacity_bytes=9 * LAYER_BYTES)
    with offload_activations(model, device=device) as activations:
        train(model, 3)
        device.copy = None  # type: ignore[assignment]
        train(model, 3)
        assert device.peak_bytes == activations.peak_bytes > 4 * LAYER_BYTES


def test_offload_activations__shares_the_capacity_with_what_is_there() -> None:
    model, device = stack(), EmulatedDevice(capacity_bytes=9 * LAYER_BYTES)
    state = device.allocate_state(6 * LAYER_BYTES // 4, rows=1)
    with offload_activations(model, device=device) as activations:
        train(model, 4)
        assert "keep" in activations.choices.values() != {"keep"}
        assert device.peak_bytes <= 9 * LAYER_BYTES
        assert activations.peak_bytes <= 3 * LAYER_BYTES
    device.release(state)


def test_offload_activations__never_copies_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, copied = stack(), []
    own = {param.untyped_storage().data_ptr() for param in model.parameters()}
    device = EmulatedDevice()
    copy_pairs = device.copy

    def recorded(
        direction: Any, pairs: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        copied.extend(
            tensor.untyped_storage().data_ptr() for pair in pairs for tensor in pair
        )
        copy_pairs(direction, pairs)

    monkeypatch.setattr(device, "copy", recorded)
    with offload_activations(model, memory_budget=2.2 * LAYER_BYTES, device=device):
        train(model, 4)
    assert copied
    assert not own.intersection(copied)


def test_offload_activations__budget_below_one_layer_is_an_error_that_names_the_layer() -> (
    None
):
    model = stack()
    with (
        offloaded(model, 0.4),
        pytest.raises(DeviceMemoryError, match=r"layer layers\.0: layers need"),
    ):
        train(model)


def edited(value: torch.Tensor) -> None:
    with torch.no_grad():
        value.mul_(2)


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("layers", [9, 2.2])
def test_offload_activations__edits_in_place_are_errors_before_anything_is_wrong(
    steps: int, layers: float
) -> None:
    model = stack()
    with offloaded(model, layers):
        train(model, steps - 1)
        model.layers[2].after = edited
        # Without hooks autograd finds it itself.
        with pytest.raises(
            (EngineError, RuntimeError), match=r"modified (in\s*place|by an inplace)"
        ) as caught:
            train(model)
        if not (steps == 4 and layers == 9):
            assert "layer layers.2: a saved tensor" in str(caught.value)
        assert all(param.grad is None for param in model.layers[0].parameters())


def test_offload_activations__releases_what_a_dropped_graph_had_saved() -> None:
    model = stack()
    with offloaded(model, 2.2) as activations:
        for _ in range(4):
            loss = model(torch.randn(LENGTH, WIDTH)).sum()
            assert activations.used_bytes > 0
            del loss
            train(model)
            assert activations.used_bytes == 0


@pytest.mark.parametrize("steps", [pytest.param(500, marks=pytest.mark.slow), 30])
def test_offload_activations__leaks_nothing(steps: int) -> None:
    model = stack()
    gc.disable()
    try:
        with offloaded(model, 2.2) as activations:
            train(model, 5)
            host_bytes = activations.host_bytes
            objects = len(gc.get_objects())
            for _ in range(steps):
                train(model)
                assert activations.used_bytes == 0
            assert activations.host_bytes == host_bytes
            assert len(gc.get_objects()) < objects + steps
    finally:
        gc.enable()


def test_offload_activations__backwards_twice_and_gradients_of_gradients() -> None:
    def second(model: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(3)
        x = torch.randn(LENGTH, WIDTH, requires_grad=True)
        loss = model(x).square().mean()
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + first.square().sum()).backward()
        return [x.grad, *(param.grad for param in model.parameters())]

    expected, model = second(stack()), stack()
    with offloaded(model, 9):
        assert same(second(model), expected)


def test_offload_activations__two_forwards_before_their_backwards() -> None:
    def both(model: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(5)
        first, second = (model(torch.randn(LENGTH, WIDTH)) for _ in range(2))
        (first - second).square().mean().backward()
        gradients = [param.grad.clone() for param in model.parameters()]
        model.zero_grad()
        return gradients

    expected, model = both(stack()), stack()
    # Both do not fit: the layers of the second pass go through the device one at a
    # time.
    with offloaded(model, 6.3):
        for _ in range(4):
            assert same(both(model), expected)


def test_offload_activations__copies_of_the_model_are_plain() -> None:
    model = stack()
    with offloaded(model, 2.2):
        train(model, 4)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            layer = other.layers[0]
            assert not isinstance(layer.forward, type(model.layers[0].forward))
            layer.load_state_dict(
                {name: value + 1 for name, value in layer.state_dict().items()}
            )
            assert not torch.equal(
                layer(torch.ones(1, WIDTH)), model.layers[0](torch.ones(1, WIDTH))
            )
        assert same(train(copy.deepcopy(model)), train(stack()))


@pytest.mark.parametrize(
    ("model", "budget", "message"),
    [
        (nn.Linear(2, 2), None, "no list of layers"),
        (nn.Sequential(nn.Linear(2, 2)), None, "no list of layers"),
        (stack(), -1, "memory_budget is -1"),
    ],
)
def test_offload_activations__bad_input(
    model: nn.Module, budget: float | None, message: str
) -> None:
    with pytest.raises(EngineError, match=message):
        offload_activations(model, memory_budget=budget)


FREE = orders.LayerOptions(), orders.PassTimes()


def test_plan_orders__prefers_nothing_to_do_and_falls_back_to_one_at_a_time() -> None:
    layers = [
        orders.MeasuredLayer(f"{number}", 0.01, 0.02, 1000, 100, True)
        for number in range(6)
    ]
    rates = {"h2d": 1e6, "d2h": 1e6}
    assert orders.plan_orders(layers, 6000, rates, *FREE).keeps_all
    assert orders.plan_orders(layers, 900, rates, *FREE) is ONE_AT_A_TIME
    # Of plans that are as fast, the one that moves least: the copies of two layers are
    # in slots.
    hidden = orders.plan_orders(layers, 5000, {"h2d": 1e9, "d2h": 1e9}, *FREE)
    assert [*map(hidden.kind, range(6))].count("offload") == 1
    some = orders.plan_orders(layers, 4000, rates, *FREE)
    assert some.copied
    assert all(other < layer for layer, other in some.returned)


def test_offload_activations__lengths_that_vary_have_the_orders_of_a_longer_one() -> (
    None
):
    def run(model: Any, lengths: list[int]) -> list[torch.Tensor]:
        torch.manual_seed(1)
        losses = []
        for length in lengths:
            loss = model(torch.randn(length, WIDTH)).square().mean()
            loss.backward()
            losses.append(loss.detach())
        return losses

    lengths = [24, 24, 24, 24, 20, 22, 25, 25, 25, 25, 23]
    expected, model = run(stack(), lengths), stack()
    with offloaded(model, 2.4) as activations:
        assert same(run(model, lengths[:5]), expected[:5])
        assert activations.plan is not None
        assert len(activations._mover._kinds_of_pass) == 1
        run(model, lengths[5:])
        assert len(activations._mover._kinds_of_pass) == 2


def test_offload_activations__transforms_of_functions_run_as_they_are() -> None:
    model = stack()
    with offloaded(model, 2.2):
        train(model, 3)
        gradient = torch.func.grad(lambda x: model(x).sum())(torch.ones(2, WIDTH))
    assert torch.equal(
        gradient, torch.func.grad(lambda x: stack()(x).sum())(torch.ones(2, WIDTH))
    )
