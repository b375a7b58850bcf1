"""Weights that are streamed: bits, memory, optimizers and state dicts."""

from __future__ import annotations

import gc
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ebbtide.features.layers.engine import transfers
from ebbtide.interleave import InterleavedAdamW, offload_activations, stream_weights
from ebbtide.interleave.engine.devices.emulated import EmulatedDevice
from ebbtide.interleave.engine.errors import DeviceMemoryError, EngineError
from ebbtide.machines.machine import StoragePath
from tests.conftest import slow_case
from tests.features.layers.stacks import (
    LAYER_BYTES,
    LENGTH,
    WEIGHT_BYTES,
    WIDTH,
    same,
    stack,
    train,
)
from tests.interleave.engine.training import MACHINE


def trained(
    model: Any,
    device: EmulatedDevice | None = None,
    interleaved: bool = False,
    steps: int = 4,
) -> list[Any]:
    """Return losses, gradients of the last step and parameters."""
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    if interleaved:
        optimizer = InterleavedAdamW(
            model.parameters(),
            lr=0.01,
            policy="pipelined",
            machine=MACHINE,
            subgroup_params=1500,
            device=device,
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
    return [
        *results,
        *(param.grad for param in model.parameters()),
        *(param.detach() for param in model.parameters()),
    ]


@pytest.mark.parametrize("interleaved", [slow_case(False), True])
@pytest.mark.parametrize("layers", [2.1, 1.1, slow_case(9)])
def test_stream_weights__has_the_bits_of_the_plain_job_within_the_budget(
    layers: float, interleaved: bool
) -> None:
    expected, model = trained(stack(), EmulatedDevice(), interleaved), stack()
    device = EmulatedDevice(h2d_bytes_per_s=2e7, d2h_bytes_per_s=2e7)
    with stream_weights(
        model, memory_budget=layers * WEIGHT_BYTES, device=device
    ) as streamed:
        assert same(trained(model, device, interleaved), expected)
        assert not streamed.kept
        # One layer is copied while another one computes.
        assert (
            min(layers, 2) // 1 * WEIGHT_BYTES
            <= streamed.peak_bytes
            <= layers * WEIGHT_BYTES
        )
        assert streamed.used_bytes == 0
    other = stack()
    other.load_state_dict(model.state_dict())
    assert same(trained(model), trained(other))


def test_stream_weights__shared_weights_stay_and_are_named() -> None:
    def tied() -> Any:
        model = stack()
        model.layers[3].linear.weight = model.inputs.weight
        return model

    expected, model = trained(tied()), tied()
    with stream_weights(model, device=EmulatedDevice()) as streamed:
        assert streamed.kept == ["layers.3.linear.weight"]
        assert same(trained(model), expected)


def test_stream_weights__changed_weights_are_an_error_before_the_backward_uses_them() -> (
    None
):
    model = stack()
    with stream_weights(model, device=EmulatedDevice()):
        loss = model(torch.randn(LENGTH, WIDTH)).sum()
        with torch.no_grad():
            model.layers[4].linear.weight.mul_(2)
        with pytest.raises(
            EngineError, match=r"layer layers\.4: a saved tensor .* modified in place"
        ):
            loss.backward()
        assert all(param.grad is None for param in model.layers[3].parameters())


def test_stream_weights__budget_below_one_layer_is_an_error() -> None:
    model = stack()
    error = pytest.raises(DeviceMemoryError, match=r"layer layers\.0: layers need")
    with stream_weights(model, memory_budget=1000, device=EmulatedDevice()), error:
        model(torch.randn(LENGTH, WIDTH))


def test_stream_weights__plan_keeps_as_many_layers_as_fit() -> None:
    expected, model = trained(stack(), steps=7), stack()
    device = EmulatedDevice(h2d_bytes_per_s=2e6, d2h_bytes_per_s=2e6)
    with stream_weights(
        model, memory_budget=4.1 * WEIGHT_BYTES, device=device
    ) as streamed:
        assert same(trained(model, steps=7), expected)
        kinds = [*streamed.choices.values()]
        # Three stay, and one at a time passes through the rest, or two stay and two
        # pass through it.
        assert 2 <= kinds.count("resident") <= 3
        assert streamed.peak_bytes <= 4.1 * WEIGHT_BYTES
        assert streamed.used_bytes == 0
        assert streamed.plan is not None
        assert streamed.predicted is not None


@pytest.mark.parametrize(
    ("weights", "ups", "downs"),
    [("resident", 0, 0), ("auto", 5, 5), ("streamed", 8, 5)],
)
def test_stream_weights__resident_layers_cross_the_link_once_at_most(
    weights: str, ups: int, downs: int
) -> None:
    model, copied = stack(), []
    device = EmulatedDevice()
    copy_pairs = device.copy

    def recorded(
        direction: Any, pairs: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        copied.append((direction, sum(source.nbytes for source, _ in pairs)))
        copy_pairs(direction, pairs)

    with stream_weights(
        model, memory_budget=9 * WEIGHT_BYTES, device=device, weights=weights
    ) as streamed:
        train(model, 4)
        device.copy = recorded  # type: ignore[method-assign]
        train(model)
        assert set(streamed.choices.values()) == {
            "streamed" if weights == "streamed" else "resident"
        }
        # Of streamed ones, the last two are there when the backward begins.
        assert (
            sum(size for direction, size in copied if direction == "h2d")
            == ups * WEIGHT_BYTES
        )
        assert (
            sum(size for direction, size in copied if direction == "d2h")
            == downs * WEIGHT_BYTES
        )


def test_stream_weights__one_budget_and_one_plan_with_activations() -> None:
    expected, model = train(stack(), 6), stack()
    with (
        stream_weights(
            model, memory_budget=3 * WEIGHT_BYTES, device=EmulatedDevice()
        ) as streamed,
        offload_activations(model, memory_budget=3 * LAYER_BYTES) as activations,
    ):
        assert same(train(model, 6), expected)
        assert activations.plan is streamed.plan is not None
        assert (
            activations.peak_bytes
            == streamed.peak_bytes
            <= 3 * (WEIGHT_BYTES + LAYER_BYTES)
        )
    model = stack()
    with (
        stream_weights(model, device=EmulatedDevice()),
        pytest.raises(EngineError, match="the same device"),
    ):
        offload_activations(model, device=EmulatedDevice())


def test_stream_weights__gradients_of_gradients() -> None:
    def second(model: Any) -> list[torch.Tensor]:
        torch.manual_seed(3)
        x = torch.randn(LENGTH, WIDTH, requires_grad=True)
        loss = model(x).square().mean()
        firsts = torch.autograd.grad(loss, [x, *model.parameters()], create_graph=True)
        (loss + sum(first.square().sum() for first in firsts)).backward()
        return [x.grad, *(param.grad for param in model.parameters())]

    expected, model = second(stack()), stack()
    with stream_weights(model, device=EmulatedDevice()):
        assert same(second(model), expected)


def test_stream_weights__copies_ahead_collect_no_garbage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, collections = stack(), []
    monkeypatch.setattr(transfers.gc, "collect", lambda: collections.append(1))
    # There is room for one layer, and none for copies ahead.
    with stream_weights(
        model, memory_budget=1.1 * WEIGHT_BYTES, device=EmulatedDevice()
    ):
        train(model, 2)
    assert not collections


def test_offload_activations__recomputes_no_layer_with_other_weights() -> None:
    model = stack()
    with offload_activations(
        model,
        memory_budget=9 * LAYER_BYTES,
        device=EmulatedDevice(),
        activations="recompute",
    ):
        train(model, 3)
        loss = model(torch.randn(LENGTH, WIDTH)).sum()
        model.zero_grad()
        with torch.no_grad():
            model.layers[1].linear.bias.mul_(2)
        with pytest.raises(
            EngineError, match=r"layer layers\.1: a parameter was modified"
        ):
            loss.backward()
        assert all(param.grad is None for param in model.layers[0].parameters())


@pytest.mark.parametrize("steps", [pytest.param(500, marks=pytest.mark.slow), 20])
def test_stream_weights__leaks_nothing_over_steps_and_errors(steps: int) -> None:
    model = stack()
    errors: tuple[type[BaseException], ...] = (ValueError, KeyboardInterrupt)
    gc.disable()
    try:
        with (
            stream_weights(
                model, memory_budget=3.1 * WEIGHT_BYTES, device=EmulatedDevice()
            ) as streamed,
            offload_activations(model, memory_budget=2.2 * LAYER_BYTES) as activations,
        ):
            train(model, 5)
            host_bytes, objects, threads = (
                activations.host_bytes,
                len(gc.get_objects()),
                threading.active_count(),
            )
            for step in range(steps):

                def fail(
                    *_: Any, error: type[BaseException] = errors[step % 2]
                ) -> None:
                    raise error("broken")

                if step % 5 == 0:
                    model.layers[2].after = (
                        fail if step % 2 else lambda value: value.register_hook(fail)
                    )
                    with pytest.raises(errors, match="broken"):
                        train(model)
                    model.layers[2].after = torch.is_tensor
                    # Tracebacks and frames are cycles.
                    gc.collect()
                train(model)
                assert streamed.used_bytes == 0
            assert activations.host_bytes <= 2 * host_bytes
            assert len(gc.get_objects()) < objects + 200 + steps
            assert threading.active_count() <= threads
    finally:
        gc.enable()


@pytest.mark.parametrize("first", ["activations", "weights"])
def test_close__of_one_leaves_the_budget_and_the_plans_of_the_other(first: str) -> None:
    expected, model = train(stack(), 6), stack()
    weights = stream_weights(
        model, memory_budget=2.1 * WEIGHT_BYTES, device=EmulatedDevice()
    )
    activations = offload_activations(model, memory_budget=2.2 * LAYER_BYTES)
    closed, other = (
        (activations, weights) if first == "activations" else (weights, activations)
    )
    memory = weights._mover.transfers.memory
    assert same(train(model, 6), expected)
    assert memory.peak_bytes > 2.3 * LAYER_BYTES
    plan = other.plan
    closed.close()
    memory.peak_bytes = 0
    assert same(train(model, 6), expected)
    assert (
        memory.limit_bytes
        == (2.1 * WEIGHT_BYTES if other is weights else 2.2 * LAYER_BYTES)
        >= memory.peak_bytes
    )
    assert other.plan not in (None, plan)
    other.close()
    assert not any("forward" in vars(layer) for layer in model.layers)
    with stream_weights(model, device=EmulatedDevice()):
        assert same(train(model, 1), train(stack(), 1))


def test_close__between_forward_and_backward_is_an_error_for_weights_and_none_for_activations() -> (
    None
):
    model = stack()
    for kind in ("weights", "activations"):
        weights = stream_weights(
            model, memory_budget=2.1 * WEIGHT_BYTES, device=EmulatedDevice()
        )
        activations = offload_activations(model, memory_budget=2.2 * LAYER_BYTES)
        train(model, 4)
        torch.manual_seed(0)
        loss = model(torch.randn(LENGTH, WIDTH)).square().mean()
        model.zero_grad()
        if kind == "weights":
            activations.close()
            weights.close()
            with pytest.raises(
                EngineError,
                match=r"layer layers\.4: its weights were closed or moved anew between",
            ):
                loss.backward()
            assert all(param.grad is None for param in model.layers.parameters())
        else:
            activations.close()
            loss.backward()
            assert same(
                [param.grad for param in model.parameters()], train(stack())[1:]
            )
            weights.close()


@contextmanager
def full_disk() -> Iterator[None]:
    """Return a context in which this process cannot write to files, as if their file
    system were full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def stored(
    model: Any, device: EmulatedDevice, folder: Path, full_steps: range = range(0)
) -> list[torch.Tensor]:
    """Train with the optimizer's state in storage that is full in some steps. Return
    losses and parameters."""
    folder.mkdir()
    optimizer = InterleavedAdamW(
        model.parameters(),
        lr=0.01,
        policy="pipelined",
        machine=replace(MACHINE, storage=(StoragePath(1e8, 1e8, path=str(folder)),)),
        subgroup_params=500,
        device=device,
        storage=[folder],
        host_memory_budget=110e3,
    )
    losses = []
    for step in range(5):
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss = model(torch.randn(LENGTH, WIDTH)).square().mean()
        loss.backward()
        if step in full_steps:
            before = [param.detach().clone() for param in model.parameters()]
            with (
                full_disk(),
                pytest.raises(EngineError, match=r"needs .* more, and .* are free"),
            ):
                optimizer.step()
            assert same(before, [*model.parameters()])
        optimizer.step()
        losses.append(loss.detach())
    assert optimizer.storage_written_bytes > 0
    optimizer.close()
    return [*losses, *(param.detach().clone() for param in model.parameters())]
