"""Hooks of features are called at the points of each step, in one order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from ebbtide import seams
from ebbtide.interleave import InterleavedAdamW
from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.params.step_calls import StepCalls, StepHooks
from ebbtide.seams import Feature

CALLS: list[tuple[str, Any]] = []
REFUSED: set[str] = set()


class Watching(StepHooks):
    """Notes each call, and raises in those that are refused."""

    def params_set(
        self, params: Sequence[torch.Tensor], whole: Mapping[int, int]
    ) -> None:
        self._note("params_set", len(params))

    def gradient_ready(self, index: int) -> None:
        self._note("gradient_ready", index)

    def gradients_in(self) -> None:
        self._note("gradients_in")

    def decided(self, updated: Sequence[int]) -> None:
        self._note("decided", list(updated))

    def returning(self) -> None:
        self._note("returning")

    def ended(self) -> None:
        self._note("ended")

    def closed(self) -> None:
        self._note("closed")

    def _note(self, name: str, value: Any = None) -> None:
        CALLS.append((name, value))
        if name in REFUSED:
            raise EngineError(f"{name} is refused")


def watching(calls: StepCalls, model: nn.Module | None) -> Watching:
    return Watching()


@pytest.fixture(autouse=True)
def _watched(monkeypatch: pytest.MonkeyPatch) -> None:
    CALLS.clear()
    REFUSED.clear()
    target = "interleave.engine.params.test_step_calls:watching"
    monkeypatch.setitem(
        seams.features(),
        "tests",
        Feature("watching", {"step-hooks": {"watching": target}}),
    )


def optimizer_of(model: nn.Module, **options: Any) -> InterleavedAdamW:
    return InterleavedAdamW(model.parameters(), policy="pipelined", **options)


def backward(model: nn.Module) -> None:
    model(torch.ones(2, 3)).sum().backward()


def test_step__calls_hooks_in_their_order() -> None:
    model = nn.Linear(3, 2)
    with torch.no_grad():
        optimizer = optimizer_of(model)
    backward(model)
    optimizer.step()
    optimizer.close()
    names = [name for name, _ in CALLS]
    # The parameters are taken at the first step, so that hooks see no gradient before.
    assert names == ["params_set", "gradients_in", "decided", "ended", "closed"]
    assert dict(CALLS)["decided"] == [0, 1]


@pytest.mark.parametrize("gradients", ["kept", "streamed"])
def test_step__calls_hooks_for_each_gradient(gradients: str) -> None:
    model = nn.Linear(3, 2)
    optimizer = optimizer_of(model, gradients=gradients)
    for _ in range(2):
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
    optimizer.close()
    assert sorted(value for name, value in CALLS if name == "gradient_ready") == [0, 1]


@pytest.mark.parametrize("name", ["gradients_in", "decided"])
def test_step__that_a_hook_refuses_changes_nothing(name: str) -> None:
    model = nn.Linear(3, 2)
    optimizer = optimizer_of(model)
    backward(model)
    optimizer.step()
    before = [param.detach().clone() for param in model.parameters()]
    REFUSED.add(name)
    with pytest.raises(EngineError, match=f"{name} is refused"):
        optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))
    REFUSED.clear()
    optimizer.step()
    assert not any(map(torch.equal, before, model.parameters()))
    optimizer.close()
