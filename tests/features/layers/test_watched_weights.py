"""Streamed weights that layers write, failures between copies, gradients of all kinds,
and autocast's cache."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ebbtide.features.layers.engine import weights as weights_module
from ebbtide.interleave import offload_activations, stream_weights
from ebbtide.interleave.engine.devices.emulated import EmulatedDevice
from ebbtide.interleave.engine.errors import DeviceMemoryError, EngineError
from tests.conftest import slow, slow_case
from tests.features.layers.live_memory import CountingDevice
from tests.interleave.engine.states import bits

WIDTH = 8
Call = Callable[["Layer", torch.Tensor], torch.Tensor]


class Layer(nn.Module):  # type: ignore[misc]
    """A layer whose forward is a function of it."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(1, WIDTH))
        self.conv = nn.Conv2d(2, 2, 3, padding=1)
        self.gru = nn.GRU(WIDTH, WIDTH)
        self.limited = nn.Embedding(5, WIDTH, max_norm=1.0)
        self.sparse = nn.Embedding(5, WIDTH, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.call(self, x).float())


def rows(x: torch.Tensor) -> torch.Tensor:
    return (x.detach()[:, 0].float().abs() * 3).long() % 5


def clamp(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        layer.linear.weight.clamp_(-0.2, 0.2)
    return layer.linear(x)


def clamp_data(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    layer.linear.weight.data.clamp_(-0.2, 0.2)
    return layer.linear(x)


def expand(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return x * layer.scale.expand(len(x), -1) + layer.linear.weight.t().sum()


def look_up(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return layer.linear(x) + layer.sparse(rows(x))


def twice(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return layer.linear(torch.tanh(layer.linear(x))) * layer.scale


def model_of(call: Call) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential()
    model.layers = nn.ModuleList(Layer(call) for _ in range(3))
    return model


def train(
    model: Any,
    autocast: Callable[[], Any] = nullcontext,
    steps: int = 5,
    calls: int = 1,
) -> list[Any]:
    """Return losses, gradients and parameters as bits. The layers run several times in
    each forward."""
    optimizer, generator = (
        torch.optim.SGD(model.parameters(), lr=0.5),
        torch.Generator().manual_seed(1),
    )
    results = []
    for _ in range(steps):
        x = torch.randn(6, WIDTH, generator=generator)
        with autocast():
            for layer in [*model.layers] * calls:
                x = layer(x)
        loss = x.square().mean()
        loss.backward()
        gradients = [
            param.grad for param in model.parameters() if param.grad is not None
        ]
        results += [
            loss.detach(),
            *(one.to_dense() if one.is_sparse else one.clone() for one in gradients),
        ]
        optimizer.step()
        optimizer.zero_grad()
    return [
        raw(value)
        for value in (*results, *(param.detach() for param in model.parameters()))
    ]


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(bits(tensor.contiguous()).numpy().tobytes())


def bf16(**options: Any) -> Any:
    return torch.autocast("cpu", torch.bfloat16, **options)


class Returning(nn.Module):  # type: ignore[misc]
    """Returns a tensor that shares memory with its weight, and reads one that it may
    have kept."""

    def __init__(
        self, share: Callable[[torch.Tensor], torch.Tensor], keeps: bool = False
    ) -> None:
        super().__init__()
        self.linear, self.share, self.keeps = nn.Linear(WIDTH, WIDTH), share, keeps
        self.shared: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not (self.keeps and self.shared):
            self.shared = [self.share(self.linear.weight)]
        weight = self.shared[0] if self.keeps else self.shared.pop()
        return torch.tanh(self.linear(x)), weight


SHARES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "weight": lambda weight: weight,
    "view": lambda weight: weight[:3].t(),
    "detached": torch.Tensor.detach,
}


def train_returning(layers: nn.ModuleList, autocast: Callable[[], Any]) -> list[bytes]:
    """Train with a loss that reads what all layers return."""
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.5)
    results = []
    for step in range(5):
        torch.manual_seed(step)
        x, penalty = torch.randn(6, WIDTH), torch.zeros(())
        with autocast():
            for layer in layers:
                x, weight = layer(x)
                penalty = penalty + (weight * weight.exp()).sum()
        del weight
        loss = x.float().square().mean() + penalty
        loss.backward()
        results += [
            loss.detach(),
            *(param.grad.clone() for param in layers.parameters()),
        ]
        optimizer.step()
        optimizer.zero_grad()
    return [raw(one) for one in results]


def returning(
    share: Callable[[torch.Tensor], torch.Tensor], keeps: bool = False
) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(*(Returning(share, keeps) for _ in range(3)))


@pytest.mark.parametrize("weights", ["streamed", slow_case("auto")])
@pytest.mark.parametrize("autocast", [bf16, slow_case(nullcontext)])
@pytest.mark.parametrize("share", slow(SHARES, but=("view",)))
def test_stream_weights__layers_return_their_weights(
    share: str, autocast: Callable[[], Any], weights: str
) -> None:
    expected, model = (
        train_returning(returning(SHARES[share]), autocast),
        returning(SHARES[share]),
    )
    with stream_weights(model, weights=weights, device=EmulatedDevice()):
        assert train_returning(model, autocast) == expected


@pytest.mark.parametrize("weights", ["streamed", slow_case("auto")])
@pytest.mark.parametrize("autocast", [bf16, slow_case(nullcontext)])
@pytest.mark.parametrize("share", slow(SHARES, but=("view",)))
def test_stream_weights__old_values_that_a_layer_has_kept_are_an_error(
    share: str, autocast: Callable[[], Any], weights: str
) -> None:
    model = returning(SHARES[share], keeps=True)
    with (
        stream_weights(model, weights=weights, device=EmulatedDevice()),
        pytest.raises(
            EngineError,
            match=(
                r"layer 0: linear\.weight has changed, and a tensor that shares its "
                r"memory"
            ),
        ),
    ):
        train_returning(model, autocast)


def test_stream_weights__releases_what_was_copied_ahead_and_left_out() -> None:
    model = model_of(twice)
    with stream_weights(model, weights="streamed", device=EmulatedDevice()) as streamed:
        train(model)
        model.layers[0](torch.ones(2, WIDTH)).sum().backward()
        assert streamed.used_bytes == 0


def test_stream_weights__kept_view_of_a_frozen_weight_has_its_values() -> None:
    def run(model: Any) -> list[bytes]:
        optimizer = torch.optim.SGD(model[1].parameters(), lr=0.5)
        results = []
        for _ in range(4):
            x, weight = model[0](torch.ones(2, WIDTH))
            y, _ = model[1](x)
            loss = (y @ weight).sum()
            loss.backward()
            optimizer.step()
            results.append(raw(loss.detach()))
        return results

    def frozen() -> Any:
        model = returning(torch.Tensor.detach)
        model[0].requires_grad_(False).keeps = True
        return model

    expected, model = run(frozen()), frozen()
    with stream_weights(model, device=EmulatedDevice()):
        assert run(model) == expected


def functional_gradient(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    gradient = torch.func.grad(lambda weight: F.linear(x, weight).square().mean())
    return layer.linear(x) + gradient(layer.linear.weight).mean()


def inner_backward(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    inputs = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(layer.linear(inputs).square().mean(), inputs)
    return layer.linear(x) + gradient.mean()


@pytest.mark.parametrize(
    "moved", [("weights",), ("activations",), ("weights", "activations")]
)
def test_moved_layers__refuse_torch_func_and_take_an_inner_backward(
    moved: tuple[str, ...],
) -> None:
    def move(model: Any) -> ExitStack:
        device, stack = EmulatedDevice(), ExitStack()
        if "weights" in moved:
            stack.enter_context(
                stream_weights(model, weights="streamed", device=device)
            )
        if "activations" in moved:
            stack.enter_context(
                offload_activations(model, activations="recompute", device=device)
            )
        return stack

    model = model_of(functional_gradient)
    with (
        move(model),
        pytest.raises(
            EngineError,
            match=r"layer layers\.0: torch\.func .* use torch\.autograd\.grad",
        ),
    ):
        train(model)
    expected, model = train(model_of(inner_backward)), model_of(inner_backward)
    with move(model):
        assert train(model) == expected


def test_stream_weights__writes_in_an_evaluation_reach_the_parameter_with_their_version() -> (
    None
):
    model = model_of(clamp)
    with stream_weights(model, device=EmulatedDevice()), torch.inference_mode():
        weight = model.layers[0].linear.weight
        version = weight._version
        model.layers[0](torch.ones(2, WIDTH))
        assert float(weight.abs().max()) < 0.201
        assert weight._version == version + 1


def test_stream_weights__write_after_the_forward_is_an_error() -> None:
    def keep(layer: Layer, x: torch.Tensor) -> torch.Tensor:
        bias, y = layer.linear.bias, layer.linear(x)

        def write(_: torch.Tensor) -> None:
            with torch.no_grad():
                bias.mul_(2)

        y.register_hook(write)
        return y

    model = model_of(keep)
    with (
        stream_weights(model, device=EmulatedDevice()),
        pytest.raises(
            EngineError,
            match=r"layers\.[0-2]: linear\.bias was written after the layer's forward",
        ),
    ):
        train(model)


def test_stream_weights__layer_that_writes_weights_is_not_recomputed() -> None:
    expected, model = train(model_of(clamp_data)), model_of(clamp_data)
    with (
        stream_weights(model, device=EmulatedDevice()),
        offload_activations(model, activations="recompute") as activations,
    ):
        assert train(model) == expected
        assert {*activations.choices.values()} == {"keep"}
        assert {*activations.not_recomputed} == {*activations.choices}


def test_emulated_device__refuses_a_copy_that_it_cannot_make_and_goes_on() -> None:
    device = EmulatedDevice(None, 1e9, 1e9)
    target = torch.zeros(4, 4)
    with pytest.raises(
        EngineError, match="a copy needs a contiguous target of the same size"
    ):
        device.copy("h2d", [(torch.ones(4, 4), target.t())])
    device.copy("h2d", [(torch.ones(4, 4), target)])
    device.record("h2d").synchronize()
    assert bool((target == 1).all())


def missing(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    """Compute without a gradient of one weight."""

    class NoGradient(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
            return gradient * 2, None

    return NoGradient.apply(layer.linear(x), layer.scale)


def test_stream_weights__gradient_that_is_none_stays_none() -> None:
    expected, model = train(model_of(missing)), model_of(missing)
    with stream_weights(model, device=EmulatedDevice()):
        assert train(model) == expected


@pytest.mark.parametrize("outside", [bf16, nullcontext])
def test_stream_weights__evaluation_and_training_in_one_autocast(
    outside: Callable[[], Any],
) -> None:
    def gradients(model: Any) -> list[Any]:
        x = torch.ones(6, WIDTH)
        with outside():
            with torch.no_grad(), bf16():
                model.layers[0](x)
            with bf16():
                y = model.layers[1](model.layers[0](x))
        y.sum().backward()
        return [
            None if param.grad is None else raw(param.grad)
            for param in model.parameters()
        ]

    expected, model = gradients(model_of(twice)), model_of(twice)
    with stream_weights(model, device=EmulatedDevice()):
        assert gradients(model) == expected


def test_stream_weights__gradients_of_gradients_under_autocast_are_refused() -> None:
    model = model_of(twice)
    with stream_weights(model, device=EmulatedDevice()):
        with bf16():
            loss = model.layers[0](torch.ones(6, WIDTH)).sum()
        with pytest.raises(
            EngineError, match=r"layers\.0: .*create_graph=True .*cache_enabled=False"
        ):
            loss.backward(create_graph=True)


def test_stream_weights__later_gradients_of_autocast_have_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected, model = train(model_of(twice), bf16), model_of(twice)
    with stream_weights(model, device=EmulatedDevice(None, 1e8, 1e8)) as streamed:
        # As on a GPU.
        monkeypatch.setattr(streamed._mover.weights, "delivers_later", True)
        assert train(model, bf16) == expected


@pytest.mark.parametrize("autocast", [bf16, nullcontext])
def test_stream_weights__gradients_are_in_pinned_memory_that_is_used_again(
    autocast: Callable[[], Any],
) -> None:
    model, device = model_of(twice), CountingDevice()
    with stream_weights(model, device=device):
        train(model, autocast, steps=3)
        count = len(device.host)
        train(model, autocast, steps=3)
        assert len(device.host) == count
        with autocast():
            loss = model.layers[0](torch.ones(6, WIDTH)).sum()
        loss.backward()
        pinned = {
            one.data_ptr() for storage in device.host if (one := storage()) is not None
        }
        gradient = model.layers[0].linear.weight.grad
        assert gradient is not None
        assert gradient.data_ptr() in pinned


class FaultyDevice(EmulatedDevice):
    """A device whose n-th call of a method fails; memory that nothing was copied to is
    not zero."""

    def __init__(self) -> None:
        super().__init__()
        self.fails: tuple[str, type[BaseException]] | None = None
        self.calls_left = 0

    def _call(self, name: str) -> None:
        if self.fails is None or self.fails[0] != name:
            return
        self.calls_left -= 1
        if self.calls_left == 0:
            raise self.fails[1]("imitated")

    def allocate_bytes(self, nbytes: int) -> torch.Tensor:
        self._call("allocate_bytes")
        return super().allocate_bytes(nbytes).fill_(7)

    def copy(self, *args: Any) -> None:
        self._call("copy")
        super().copy(*args)

    def wait(self, *args: Any) -> None:
        self._call("wait")
        super().wait(*args)

    def record(self, *args: Any) -> Any:
        self._call("record")
        return super().record(*args)


def with_failure(
    model: Any, fail: Callable[[Callable[[], None]], None], autocast: Callable[[], Any]
) -> list[Any]:
    """Train; one batch in the middle goes through a function that makes it fail, and is
    skipped."""

    def run() -> None:
        x = torch.ones(20, WIDTH)
        with autocast():
            for layer in model.layers:
                x = layer(x)
        x.sum().backward()

    before = train(model, autocast, steps=4)
    fail(run)
    model.zero_grad()
    return before + train(model, autocast, steps=2)


@pytest.mark.parametrize("autocast", [nullcontext, slow_case(bf16)])
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError,
        *(slow_case(one) for one in (DeviceMemoryError, KeyboardInterrupt)),
    ],
)
@pytest.mark.parametrize(
    "method",
    slow(["allocate_bytes", "copy", "wait", "record"], but=["allocate_bytes", "copy"]),
)
def test_stream_weights__failed_call_of_the_device_leaves_no_weight_there(
    method: str, error: type[BaseException], autocast: Callable[[], Any]
) -> None:
    expected = with_failure(model_of(twice), lambda _: None, autocast)
    for number in range(1, 40, 6):
        model, device = model_of(twice), FaultyDevice()

        def fail(
            run: Callable[[], None], device: FaultyDevice = device, number: int = number
        ) -> None:
            device.fails, device.calls_left = (method, error), number
            try:
                run()
            except error:
                pass
            finally:
                device.fails = None

        with stream_weights(model, weights="streamed", device=device) as streamed:
            assert with_failure(model, fail, autocast) == expected
            assert streamed.used_bytes == 0


def test_stream_weights__interrupt_at_any_line_leaves_no_weight_there() -> None:
    expected = with_failure(model_of(twice), lambda _: None, nullcontext)
    for number in range(1, 1500, 149):
        model, lines = model_of(twice), [number]

        def trace(
            frame: FrameType, event: str, _: Any, lines: list[int] = lines
        ) -> Any:
            if not frame.f_code.co_filename.endswith(
                ("layers/weights.py", "layers/transfers.py", "layers/memory.py")
            ):
                return None
            lines[0] -= event == "line"
            if not lines[0] and event == "line":
                raise KeyboardInterrupt
            return trace

        def fail(run: Callable[[], None], trace: Any = trace) -> None:
            before = sys.gettrace()
            sys.settrace(trace)
            try:
                run()
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(before)

        with stream_weights(model, weights="streamed", device=FaultyDevice()):
            assert with_failure(model, fail, nullcontext) == expected


def test_stream_weights__failure_of_the_constructor_leaves_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, made = model_of(twice), weights_module._Weight

    def fail(layer: Any, name: str, *args: Any) -> Any:
        if name == "gru.bias_ih_l0":
            raise EngineError("no memory")
        return made(layer, name, *args)

    monkeypatch.setattr(weights_module, "_Weight", fail)
    with pytest.raises(EngineError, match="no memory"):
        stream_weights(model, device=EmulatedDevice())
    assert "forward" not in vars(model.layers[0])
    assert train(model) == train(model_of(twice))
