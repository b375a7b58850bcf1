"""Layers whose forward must not be computed again, or whose recomputation differs:
equal bits, or an error."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ebbtide.features.layers.engine import effects, recomputation
from ebbtide.features.layers.engine.moving import MovedLayers
from ebbtide.features.layers.engine.nondeterminism import OperationWatch
from ebbtide.features.layers.engine.orders import MeasuredLayer
from ebbtide.features.layers.engine.recomputation import RecomputedLayers
from ebbtide.interleave import offload_activations
from ebbtide.interleave.engine.devices.emulated import EmulatedDevice
from ebbtide.interleave.engine.errors import EngineError
from tests.conftest import slow
from tests.features.layers.stacks import same

WIDTH, ROWS = 8, 16
GENERATOR = torch.Generator()
CALLS = [0]


class Layer(nn.Module):  # type: ignore[misc]
    """A layer that scales by a number from a source of its own."""

    def __init__(self, source: Callable[[Layer], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros(()))
        self.calls, self.log, self.array = 0, [0.0], np.zeros(1)
        self.generator, self.own = (
            torch.Generator().manual_seed(3),
            np.random.default_rng(3),
        )
        self.python, self.source = random.Random(3), source

    def forward(self, x: torch.Tensor, **_: Any) -> torch.Tensor:
        return x + torch.tanh(self.source(self) * self.linear(x)) * torch.sigmoid(x)


def counts(layer: Layer) -> float:
    layer.calls += 1
    return 1 / layer.calls


def logs(layer: Layer) -> float:
    layer.log.append(0.5 * len(layer.log))
    return layer.log[-1]


def writes_an_array(layer: Layer) -> float:
    layer.array += 1
    return float(1 / layer.array[0])


def writes_a_buffer(layer: Layer) -> torch.Tensor:
    layer.count.add_(1)
    return 1 / layer.count.clone()


def counts_in_a_closure() -> Callable[[Layer], float]:
    count = 0

    def source(_: Layer) -> float:
        nonlocal count
        count += 1
        return 1 / count

    return source


def counts_in_a_global(_: Layer) -> float:
    CALLS[0] += 1
    return 1 / CALLS[0]


class Counted:
    calls = 0

    def __call__(self, _: Layer) -> float:
        Counted.calls += 1
        return 1 / Counted.calls


def fresh(source: Any) -> Callable[[Layer], Any]:
    """Return a source as at the start of a job."""
    CALLS[0] = Counted.calls = 0
    GENERATOR.manual_seed(5)
    made: Callable[[Layer], Any] = source() if source is counts_in_a_closure else source
    return made


EFFECTS = {
    "counter": counts,
    "list": logs,
    "array": writes_an_array,
    "buffer": writes_a_buffer,
    "closure": counts_in_a_closure,
    "global": counts_in_a_global,
    "class": Counted(),
    "random": lambda _: random.random(),
    "numpy": lambda _: np.random.rand(),
    "own random": lambda layer: layer.python.random(),
    "own numpy": lambda layer: float(layer.own.random()),
    "own torch": lambda layer: torch.rand((), generator=layer.generator),
    "global torch": lambda _: torch.rand((), generator=GENERATOR),
}


def train(
    source: Any,
    steps: int = 6,
    call: Callable[[Layer, torch.Tensor, int], torch.Tensor] = lambda layer, x, _: (
        layer(x)
    ),
    **options: Any,
) -> tuple[list[torch.Tensor], MovedLayers | None]:
    """Return losses and parameters, and numbers that the job draws next."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    source = fresh(source)
    model, owner = nn.Module(), None
    model.layers = nn.ModuleList(Layer(source) for _ in range(4))
    if options:
        owner = offload_activations(
            model, device=EmulatedDevice(None, 1e6, 1e6), **options
        )
    optimizer, results = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(steps):
        x = torch.randn(ROWS, WIDTH)
        for layer in model.layers:
            x = call(layer, x, step)
        loss = x.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        results.append(loss.detach())
    results += [one.detach().clone() for one in model.state_dict().values()]
    later = [
        random.random(),
        np.random.rand(),
        float(torch.rand(())),
        float(torch.rand((), generator=GENERATOR)),
    ]
    if owner is not None:
        owner.close()
    return [*results, torch.tensor([*later, CALLS[0], Counted.calls])], owner


def late(source: Callable[[Layer], Any]) -> Callable[[Layer], Any]:
    """Return a source that only starts in iteration 5."""
    steps = [0]

    def start(_: Layer) -> Any:
        return source(_) if steps[0] >= 4 else 1.0

    start.steps = steps  # type: ignore[attr-defined]
    return start


def train_late(source: Callable[[Layer], Any], **options: Any) -> Any:
    starts = late(source)

    def call(layer: Layer, x: torch.Tensor, step: int) -> torch.Tensor:
        starts.steps[0] = step  # type: ignore[attr-defined]
        return layer(x)

    return train(starts, call=call, **options)


@pytest.mark.parametrize(
    "kind", ["counter", "buffer", "random", "own numpy", "own torch"]
)
def test_recomputation__keeps_what_a_forward_with_a_late_effect_has_saved(
    kind: str,
) -> None:
    expected, _ = train_late(EFFECTS[kind])
    results, owner = train_late(EFFECTS[kind], activations="recompute")
    assert same(results, expected)
    assert {*owner.choices.values()} == {"offload"}
    assert len(owner.not_recomputed) == 4


@pytest.fixture
def unseen(monkeypatch: pytest.MonkeyPatch) -> Callable[[Layer], float]:
    # As what native code has.
    monkeypatch.setattr(effects.Watch, "change", lambda _: "")
    numbers = iter(np.linspace(1, 2, 1000))
    return lambda _: float(next(numbers))


def test_recomputation__a_trial_refuses_layers_that_differ(
    unseen: Callable[[Layer], float],
) -> None:
    _, owner = train(unseen, activations="recompute")
    assert owner is not None
    assert set(owner.not_recomputed.values()) == {
        "computing it again gives other values"
    }
    assert "recompute" not in owner.choices.values()


def test_recomputation__a_later_difference_is_an_error_before_a_gradient_is_used(
    unseen: Callable[[Layer], float],
) -> None:
    with pytest.raises(
        EngineError,
        match=r'layer layers\.3: computing it again .*use activations="offload"',
    ):
        train_late(unseen, activations="recompute")


def test_recomputation__warns_and_goes_on_as_checkpoint_does(
    unseen: Callable[[Layer], float], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING", "ebbtide"):
        results, owner = train_late(
            unseen, activations="recompute", on_difference="warn"
        )
    assert len(results) > 6
    assert set(owner.choices.values()) == {"offload"}
    assert (
        "layer layers.3: computing it again gives other values, which are used"
        in caplog.text
    )


class Gated(nn.Module):  # type: ignore[misc]
    """A layer whose output hides what it saves: its gate is 0 at first."""

    def __init__(self, number: Callable[[], float]) -> None:
        super().__init__()
        self.linear, self.gate, self.number = (
            nn.Linear(WIDTH, WIDTH),
            nn.Parameter(torch.zeros(())),
            number,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gate * torch.tanh(self.number() * self.linear(x))


def test_recomputation__compares_what_outputs_hide(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(effects.Watch, "change", lambda _: "")
    numbers = iter([*[1.0] * 100])
    model = nn.Module()
    model.layers = nn.ModuleList(Gated(lambda: next(numbers)) for _ in range(2))
    with offload_activations(model, activations="recompute", device=EmulatedDevice()):
        for step in range(5):
            if step == 4:
                numbers = iter([1.0, 1.0, 2.0, 2.0])
            x = torch.ones(ROWS, WIDTH)
            for layer in model.layers:
                x = layer(x)
            if step == 4:
                with pytest.raises(EngineError, match="gives other values"):
                    x.sum().backward()
            else:
                x.sum().backward()


@pytest.mark.parametrize(
    "how", slow(["position", "keyword", "dict", "object"], but=["keyword", "object"])
)
def test_recomputation__inputs_that_are_written_to_later_are_an_error(how: str) -> None:
    class Box:
        def __init__(self, value: torch.Tensor) -> None:
            self.value = value

    class Biased(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(
            self, x: torch.Tensor, bias: Any = None, box: Any = None
        ) -> torch.Tensor:
            bias = bias["bias"] if isinstance(bias, dict) else bias
            return x + torch.tanh(self.linear(x) + (bias if box is None else box.value))

    model = nn.Module()
    model.layers = nn.ModuleList(Biased() for _ in range(2))
    with offload_activations(model, activations="recompute", device=EmulatedDevice()):
        for step in range(5):
            bias, x = torch.ones(WIDTH), torch.ones(ROWS, WIDTH)
            for layer in model.layers:
                if step == 4:
                    bias.mul_(0.5)
                if how == "object":
                    x = layer(x, box=Box(bias))
                else:
                    x = {
                        "position": lambda: layer(x, bias),  # noqa: B023
                        "keyword": lambda: layer(x, bias=bias),  # noqa: B023
                        "dict": lambda: layer(x, bias={"bias": bias}),  # noqa: B023
                    }[how]()
            if step < 4:
                x.sum().backward()
            else:
                with pytest.raises(
                    EngineError,
                    match=r"layer layers\.0: (a saved tensor|computing it again)",
                ):
                    x.sum().backward()


def test_recomputation__keeps_the_identity_of_inputs() -> None:
    class Same(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.linear(x)) if x is y else torch.exp(torch.tanh(x))

    model = nn.Module()
    model.layers = nn.ModuleList(Same() for _ in range(2))
    with offload_activations(
        model, activations="recompute", device=EmulatedDevice()
    ) as owner:
        for _ in range(5):
            x = torch.ones(ROWS, WIDTH)
            for layer in model.layers:
                x = layer(x, x)
            x.sum().backward()
        assert owner.not_recomputed == {}


def test_recomputation__restores_generators_that_a_trial_draws_from() -> None:
    own = torch.Generator().manual_seed(1)
    before = own.get_state()
    with OperationWatch() as watch:
        torch.rand(3, generator=own)
    assert watch.restore()
    assert torch.equal(own.get_state(), before)


def test_operation_watch__names_operations_that_torch_lists() -> None:
    with OperationWatch() as watch:
        torch.ones(4).cumsum(0).put(torch.zeros(2, dtype=torch.long), torch.ones(2))
    assert watch.name == "put"
    torch.use_deterministic_algorithms(True)
    try:
        with OperationWatch() as watch, suppress(RuntimeError):
            torch.ones(4).put(torch.zeros(2, dtype=torch.long), torch.ones(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert watch.name == ""


def test_recomputation__never_recomputes_operations_that_torch_lists() -> None:
    class Put(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(
                self.linear(x).put(torch.zeros(2, dtype=torch.long), torch.ones(2))
            )

    model = nn.Sequential(Put(), nn.Linear(WIDTH, WIDTH))
    with offload_activations(
        model, activations="recompute", device=EmulatedDevice()
    ) as owner:
        for _ in range(5):
            model(torch.ones(ROWS, WIDTH)).sum().backward()
        assert owner.not_recomputed == {
            "0": "torch lists its operation put as nondeterministic"
        }
        assert [*owner.choices.values()] == ["keep", "recompute"]


def test_offload_activations__layer_with_a_tensor_as_attribute_is_recomputed() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    model[0].scale = torch.ones(WIDTH)
    with offload_activations(
        model, activations="recompute", device=EmulatedDevice()
    ) as owner:
        for _ in range(4):
            model(torch.ones(ROWS, WIDTH)).sum().backward()
        assert set(owner.choices.values()) == {"recompute"}


def test_measured_layer__counts_the_comparison_with_recomputation() -> None:
    layer = MeasuredLayer("layer", 1.0, 2.0, 100, 10, True, comparison_s=0.25)
    assert [form.recompute_s for form in layer.in_workload().forms] == [0.0, 1.25]


def test_recomputed_layers__refuses_an_unknown_reaction() -> None:
    with pytest.raises(
        EngineError, match="on_difference='ask': choose from error, warn"
    ):
        RecomputedLayers("ask")
    assert recomputation.ON_DIFFERENCE == ("error", "warn")
