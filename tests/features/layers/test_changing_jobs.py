"""Jobs whose layers move: changes of their type, a GradScaler, and the order of
gradients."""

from __future__ import annotations

from contextlib import ExitStack, closing

import pytest
import torch
from torch import nn

from ebbtide.interleave import offload_activations, stream_weights
from ebbtide.interleave.engine.devices.emulated import EmulatedDevice
from ebbtide.interleave.engine.errors import EngineError
from tests.features.layers.stacks import (
    LAYER_BYTES,
    LENGTH,
    WEIGHT_BYTES,
    WIDTH,
    Stack,
    interleaved,
    same,
    stack,
)
from tests.interleave.engine.grid.models import Net

Results = list[torch.Tensor]
KINDS = ("perceptron", "attention", "split")
# Layers whose activations, and whose weights, the memory holds; None: they are not
# moved.
CHOICES = [(2.2, None), (None, 2.1), (1.2, 1.1)]


def steps(model: Stack) -> Results:
    """Return the losses of some steps, of an optimizer of their own."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    results = []
    for step in range(5):
        torch.manual_seed(step)
        loss = (
            model(torch.randn(LENGTH, WIDTH, dtype=model.inputs.weight.dtype))
            .square()
            .mean()
        )
        loss.backward()
        results.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return results


def losses_before_and_after_a_cast(model: Stack) -> Results:
    before = steps(model)
    model.bfloat16()
    return before + steps(model)


def test_moved_layers__have_the_bits_of_a_plain_job_that_changes_its_type() -> None:
    """Jobs of tests/interleave/engine/grid change in other ways, and keep their
    type."""
    plain = stack()
    expected = losses_before_and_after_a_cast(plain)
    for activation_layers, weight_layers in CHOICES:
        model, device = stack(), EmulatedDevice()
        with ExitStack() as moved:
            if weight_layers is not None:
                moved.enter_context(
                    stream_weights(
                        model, memory_budget=weight_layers * WEIGHT_BYTES, device=device
                    )
                )
            if activation_layers is not None:
                budget = activation_layers * LAYER_BYTES
                moved.enter_context(
                    offload_activations(model, memory_budget=budget, device=device)
                )
            assert same(losses_before_and_after_a_cast(model), expected)
        assert same([*model.parameters()], [*plain.parameters()])


def scaled(
    kind: str, activations: str | None, weights: str | None, gradients: str = "kept"
) -> tuple[Results, int]:
    """Return what a job with a GradScaler has computed, and the number of steps that it
    has skipped."""
    torch.manual_seed(0)
    model, device = Net(KINDS), EmulatedDevice()
    with ExitStack() as moved:
        if weights is not None:
            moved.enter_context(stream_weights(model, device=device, weights=weights))
        if activations is not None:
            moved.enter_context(
                offload_activations(
                    model, device=device, memory_budget=1e6, activations=activations
                )
            )
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            model.parameters(), lr=0.01
        )
        if kind != "torch":
            optimizer = moved.enter_context(
                closing(interleaved(model, device, kind, gradients))
            )
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=2)
        results, skipped = [], 0
        for step in range(8):
            tokens = torch.randint(0, 8, (10,))
            with torch.autocast("cpu", torch.float16):
                loss = model(tokens)
            scaler.scale(loss).backward()
            if step % 3 == 2:
                scaler.unscale_(optimizer)
                results.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
            scale = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            skipped += scaler.get_scale() < scale
            results.append(loss.detach())
    return [*results, *(param.detach() for param in model.parameters())], skipped


def test_grad_scaler__streamed_gradients_are_an_error_that_names_the_remedy() -> None:
    with pytest.raises(
        EngineError,
        match=r"loss_scale=, and optimizer.scale\(loss\)\) in place of GradScaler",
    ):
        scaled("none", None, None, "streamed")


@pytest.mark.parametrize("activations", [None, "recompute", "offload"])
def test_stream_weights__gradients_come_in_the_order_of_the_plain_job(
    activations: str | None,
) -> None:
    orders: list[list[str]] = []
    for is_moved in (False, True):
        torch.manual_seed(0)
        model, order = Net(KINDS), []
        with ExitStack() as moved:
            if is_moved:
                moved.enter_context(stream_weights(model, device=EmulatedDevice()))
                if activations is not None:
                    moved.enter_context(
                        offload_activations(
                            model, memory_budget=1e6, activations=activations
                        )
                    )
            for name, param in model.named_parameters():
                param.register_post_accumulate_grad_hook(
                    lambda _, name=name, order=order: order.append(name)
                )
            for _ in range(4):
                model(torch.arange(9)).backward()
        orders.append(order)
    assert orders[0] == orders[1]
