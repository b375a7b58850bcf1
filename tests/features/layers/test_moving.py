"""move_layers: what moves by each option, by several calls, and of layers that are
frozen or have adapters."""

from __future__ import annotations

import gc
import itertools
from collections import Counter
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from ebbtide.interleave import (
    InterleavedAdamW,
    move_layers,
    offload_activations,
    stream_weights,
)
from ebbtide.interleave.engine.devices.emulated import EmulatedDevice
from ebbtide.interleave.engine.errors import EngineError
from tests.conftest import slow
from tests.features.layers.live_memory import CountingDevice
from tests.features.layers.stacks import (
    LAYER_BYTES,
    LENGTH,
    WEIGHT_BYTES,
    WIDTH,
    Stack,
    interleaved,
    same,
    stack,
    train,
)
from tests.interleave.engine.grid.models import add_adapters

LAYERS = 5
# Options, and the number of layers whose weights they stream.
OPTIONS: list[dict[str, Any]] = [
    {"weights": "streamed"},
    {"weights": "streamed:2", "activations": "recompute"},
    {"weights": "streamed:3", "activations": "keep"},
    {"weights": "resident", "activations": "offload"},
    {"memory_budget": 2 * (WEIGHT_BYTES + LAYER_BYTES)},
]


class CopyCounter(EmulatedDevice):
    """An emulated device that counts the bytes which are copied from and to each tensor
    of the host."""

    def __init__(self) -> None:
        super().__init__()
        self.moved: Counter[tuple[str, int]] = Counter()

    def copy(
        self, direction: Any, pairs: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        for source, target in pairs:
            host = source if direction == "h2d" else target
            self.moved[direction, host.data_ptr()] += source.nbytes
        super().copy(direction, pairs)

    def bytes_of(self, direction: str, module: nn.Module) -> int:
        """Return the bytes that were copied from or to the parameters of a module."""
        return sum(
            self.moved[direction, param.data_ptr()] for param in module.parameters()
        )


def frozen(count: int) -> Stack:
    """Return a model of which the inputs and the first layers are not trained."""
    model = stack(LAYERS)
    for module in (model.inputs, *model.layers[:count]):
        module.requires_grad_(False)
    return model


def adapted() -> Stack:
    """Return a model of which adapters in the layers are trained."""
    model = stack(LAYERS).requires_grad_(False)
    for layer in model.layers:
        add_adapters(layer)
    return model


MODELS = {"trained": stack, "frozen": partial(frozen, 2), "adapted": adapted}


def trained(model: Stack, optimizer: Any, steps: int = 5) -> list[torch.Tensor]:
    """Return losses and parameters."""
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss = model(torch.randn(LENGTH, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(param.detach() for param in model.parameters())]


def optimizer_of(kind: str, model: Stack, device: EmulatedDevice | None) -> Any:
    params = [param for param in model.parameters() if param.requires_grad]
    if kind == "interleaved":
        return interleaved(model, device, "none", "kept")
    return (
        torch.optim.AdamW(params, lr=0.01)
        if kind == "adamw"
        else torch.optim.SGD(params, lr=0.1, momentum=0.9)
    )


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(
    "optimizer", slow(["sgd", "adamw", "interleaved"], but=["interleaved"])
)
def test_move_layers__has_the_bits_of_the_plain_job(kind: str, optimizer: str) -> None:
    plain = MODELS[kind]()
    expected = trained(plain, optimizer_of(optimizer, plain, EmulatedDevice()))
    for options in OPTIONS:
        model, device = MODELS[kind](), EmulatedDevice()
        with move_layers(model, device=device, **options) as moved:
            assert same(
                trained(model, optimizer_of(optimizer, model, device)), expected
            ), options
            assert moved.used_bytes == 0
            if "memory_budget" in options:
                assert moved.peak_bytes <= options["memory_budget"]


@pytest.mark.parametrize("count", range(1, LAYERS + 1))
def test_move_layers__streams_a_number_of_layers_and_leaves_the_others(
    count: int,
) -> None:
    model, device = stack(LAYERS), CopyCounter()
    before = [param.data_ptr() for param in model.layers.parameters()]
    with move_layers(
        model, weights=f"streamed:{count}", activations="keep", device=device
    ) as moved:
        assert [*moved.weights.values()].count("streamed") == count
        train(model, 4)
        streamed = [device.bytes_of("h2d", layer) > 0 for layer in model.layers]
        assert streamed == [kind == "streamed" for kind in moved.weights.values()]
        after = [param.data_ptr() for param in model.layers.parameters()]
        assert sum(map(int.__eq__, before, after)) == 2 * (LAYERS - count)
        assert moved.peak_bytes <= 2 * WEIGHT_BYTES


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "streamed:6"}, "weights='streamed:6': Stack has 5 layers"),
        (
            {"weights": "streamed:0"},
            "weights='streamed:0': choose from resident, streamed, streamed:K, auto",
        ),
        ({"weights": "streamed:K"}, "weights='streamed:K': choose from"),
        ({"weights": "some"}, "weights='some': choose from"),
        (
            {"activations": "offload:2"},
            "activations='offload:2': choose from keep, recompute",
        ),
        ({"on_difference": "stop", "activations": "recompute"}, "on_difference='stop'"),
    ],
)
def test_move_layers__bad_option_is_one_line_and_leaves_the_model(
    options: dict[str, str], message: str
) -> None:
    model = stack(LAYERS)
    with pytest.raises(EngineError) as error:
        move_layers(model, **options)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert not any("forward" in vars(layer) for layer in model.layers)


@pytest.mark.parametrize("weights", ["streamed", "auto"])
def test_move_layers__frozen_layers_go_up_and_never_down(weights: str) -> None:
    model, device = frozen(2), CopyCounter()
    with move_layers(
        model, weights=weights, activations="keep", memory_budget=1e9, device=device
    ):
        train_frozen(model, 4)
        device.moved.clear()
        train_frozen(model, 1)
        for layer in model.layers:
            is_frozen = not any(param.requires_grad for param in layer.parameters())
            gradients = [param.grad for param in layer.parameters()]
            assert all(gradient is None for gradient in gradients) == is_frozen
            assert device.bytes_of("d2h", layer) == 0
            # The first layers have no backward, and the last two are there when it
            # begins.
            ups = (
                1 if is_frozen or weights == "auto" or layer in model.layers[-2:] else 2
            )
            assert device.bytes_of("h2d", layer) == ups * WEIGHT_BYTES
        gradient_bytes = sum(
            param.nbytes for param in model.layers.parameters() if param.requires_grad
        )
        assert (
            sum(
                size
                for (direction, _), size in device.moved.items()
                if direction == "d2h"
            )
            == gradient_bytes
        )


def train_frozen(model: Stack, steps: int) -> None:
    for _ in range(steps):
        model.zero_grad()
        model(torch.randn(LENGTH, WIDTH)).square().mean().backward()


def test_move_layers__frozen_layer_behind_trained_ones_comes_for_its_backward() -> None:
    model, device = stack(LAYERS), CopyCounter()
    model.layers[1].requires_grad_(False)
    with move_layers(model, weights="streamed", activations="keep", device=device):
        train_frozen(model, 4)
        device.moved.clear()
        train_frozen(model, 1)
        assert device.bytes_of("h2d", model.layers[1]) == 2 * WEIGHT_BYTES
        assert device.bytes_of("d2h", model.layers[1]) == 0


def test_move_layers__adapters_stay_on_the_device_and_their_base_streams() -> None:
    model, device = adapted(), CopyCounter()
    adapters = {
        name: param for name, param in model.named_parameters() if param.requires_grad
    }
    before = [param.data_ptr() for param in adapters.values()]
    with move_layers(
        model, weights="streamed", activations="keep", device=device
    ) as moved:
        assert moved.kept == [name for name in adapters if name.startswith("layers")]
        optimizer = InterleavedAdamW(
            adapters.values(), lr=0.01, policy="pipelined", device=EmulatedDevice()
        )
        trained(model, optimizer)
        optimizer.close()
        assert [param.data_ptr() for param in adapters.values()] == before
        assert not any(device.moved["h2d", place] for place in before)
        for layer in model.layers:
            assert (
                device.bytes_of("h2d", layer) % WEIGHT_BYTES
                == 0
                < device.bytes_of("h2d", layer)
            )
        assert not any(direction == "d2h" for direction, _ in device.moved)


def test_move_layers__adapters_that_are_added_later_stay_where_the_layer_computes() -> (
    None
):
    expected = trained_after_adapting(stack(LAYERS))
    model, device = stack(LAYERS), CopyCounter()
    with move_layers(model, weights="streamed", device=device) as moved:
        assert same(trained_after_adapting(model), expected)
        assert moved.kept == [
            name for name, param in model.named_parameters() if param.requires_grad
        ]


def trained_after_adapting(model: Stack) -> list[torch.Tensor]:
    train(model, 2)
    model.zero_grad()
    model.requires_grad_(False)
    for layer in model.layers:
        add_adapters(layer)
    return trained(model, optimizer_of("adamw", model, None))


class Quantized(nn.Module):  # type: ignore[misc]
    """A layer with a weight of 8 bits, and a scale that is trained."""

    def __init__(self, kind: type[nn.Parameter] | None) -> None:
        super().__init__()
        weight = torch.randint(0, 255, (WIDTH, WIDTH), dtype=torch.uint8)
        if kind is None:
            self.register_buffer("weight", weight)
        else:
            self.weight = kind(weight, requires_grad=False)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.01))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = (self.weight.float() - 128) * self.scale
        return torch.tanh(x @ weight.t())


class Packed(nn.Parameter):  # type: ignore[misc]
    """A parameter with a state of its own, as those of bitsandbytes."""


@pytest.mark.parametrize("kind", [nn.Parameter, Packed, None])
def test_move_layers__quantized_weights_stream_as_bytes_or_stay_and_are_named(
    kind: type[nn.Parameter] | None, caplog: pytest.LogCaptureFixture
) -> None:
    def quantized() -> Stack:
        model = stack(LAYERS)
        model.layers = nn.ModuleList(Quantized(kind) for _ in range(LAYERS))
        return model

    plain, model, device = quantized(), quantized(), CopyCounter()
    expected = trained(plain, optimizer_of("adamw", plain, None))
    with (
        caplog.at_level("INFO", "ebbtide"),
        move_layers(
            model, weights="streamed", activations="keep", device=device
        ) as moved,
    ):
        assert same(trained(model, optimizer_of("adamw", model, None)), expected)
        ups = [device.moved["h2d", layer.weight.data_ptr()] for layer in model.layers]
        is_plain = kind is nn.Parameter
        assert all((size > 0) == is_plain and size % WIDTH**2 == 0 for size in ups)
        names = (
            [] if is_plain else [f"layers.{number}.weight" for number in range(LAYERS)]
        )
        assert [name for name in moved.kept if name.endswith("weight")] == names
        assert all(name in caplog.text for name in names)


CALLS: dict[str, Any] = {
    "weights": partial(stream_weights, weights="streamed", memory_budget=1e6),
    "two weights": partial(stream_weights, weights="streamed:2"),
    "activations": partial(
        offload_activations, activations="offload", memory_budget=1e5
    ),
    "recomputed": partial(offload_activations, activations="recompute"),
    "both": partial(
        move_layers, weights="streamed:3", activations="offload", memory_budget=1e9
    ),
}
# The number of layers whose weights a call streams, and what it does with activations.
STREAMED = {"weights": 5, "two weights": 2, "both": 3}
ACTIVATIONS = {"activations": "offload", "recomputed": "recompute", "both": "offload"}


@pytest.mark.parametrize("calls", [*itertools.permutations(CALLS, 2)])
def test_move_layers__calls_in_any_order_widen_what_moves(
    calls: tuple[str, ...],
) -> None:
    """The last call is made twice."""
    plain = stack(LAYERS)
    expected = trained(plain, optimizer_of("sgd", plain, None))
    model, device = stack(LAYERS), EmulatedDevice()
    with ExitStack() as open_calls:
        for call in (*calls, calls[-1]):
            moved = open_calls.enter_context(CALLS[call](model, device=device))
        assert same(trained(model, optimizer_of("sgd", model, None)), expected)
        weights, activations = [*moved.weights.values()], {*moved.activations.values()}
        assert weights.count("streamed") == next(
            (STREAMED[call] for call in calls[::-1] if call in STREAMED), 0
        )
        kind = next(
            (ACTIVATIONS[call] for call in calls[::-1] if call in ACTIVATIONS), "keep"
        )
        assert kind in activations
        # The last offloaded ones stay in their slots.
        assert activations <= {kind, "keep"}
    assert not any("forward" in vars(layer) for layer in model.layers)


def test_move_layers__budgets_of_calls_in_effect_are_one() -> None:
    model, device = stack(LAYERS), EmulatedDevice()
    limits: list[Any] = []
    with ExitStack() as calls:
        for call in ("activations", "weights", "activations", "both"):
            calls.enter_context(CALLS[call](model, device=device))
            train(model)
            limits.append(moved_limit(model))
    assert limits == [1e5, 1.1e6, 1.1e6, 1e9]


def moved_limit(model: Stack) -> float | None:
    """Return the limit of the memory of what moves."""
    limit: float | None = model.layers[0].forward.owner.transfers.memory.limit_bytes
    return limit


def test_move_layers__closing_the_last_call_leaves_what_the_others_say() -> None:
    expected, model = train(stack(LAYERS), 2), stack(LAYERS)
    first = stream_weights(model, weights="streamed", device=EmulatedDevice())
    with move_layers(model, weights="streamed:2", activations="offload") as second:
        assert [*first.weights.values()].count("streamed") == 2
        assert same(train(model, 2), expected)
        assert {*second.activations.values()} == {"offload"}
    assert [*first.choices.values()] == ["streamed"] * LAYERS
    assert same(train(model, 2), expected)
    first.close()
    assert same(train(model, 2), expected)


@pytest.mark.parametrize("options", OPTIONS[:3])
def test_close__leaves_no_pinned_memory_behind(options: dict[str, Any]) -> None:
    model, device = stack(LAYERS), CountingDevice()
    gc.collect()
    gc.disable()
    try:
        with move_layers(model, device=device, **options):
            train(model, 5)
            model.zero_grad()
        # Emulated parameters stay in the memory that stands for the host's.
        own = {param.data_ptr() for param in model.parameters()}
        storages = [storage for one in device.host if (storage := one()) is not None]
        assert [storage for storage in storages if storage.data_ptr() not in own] == []
    finally:
        gc.enable()


def test_move_layers__calls_for_a_part_of_the_model_are_an_error() -> None:
    model = nn.Sequential(stack(LAYERS), stack(2))
    with (
        move_layers(model[0]),
        pytest.raises(EngineError, match="moves already, with other layers"),
    ):
        move_layers(nn.Sequential(*model[0].layers, nn.Linear(WIDTH, WIDTH)))
