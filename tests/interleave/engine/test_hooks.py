"""Hooks of torch.optim.Optimizer: called when torch calls them, with what torch gives
them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ebbtide.interleave.engine.interleaved_adamw import InterleavedAdamW


def job(make: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    return model, make(model.parameters())


def ebbtide(params: Any, **options: Any) -> InterleavedAdamW:
    return InterleavedAdamW(params, policy="interleaved:2", **options)


def train(model: nn.Module, optimizer: Any) -> None:
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def summary(state_dict: dict[str, Any]) -> dict[Any, Any]:
    """Return what torch's state dict has, without masters and with rounded moments."""
    names = ("step", "exp_avg", "exp_avg_sq")
    return {
        key: {
            name: [round(value, 5) for value in entry[name].double().flatten().tolist()]
            for name in names
        }
        for key, entry in state_dict["state"].items()
    }


def record_calls(make: Any) -> list[Any]:
    """Return the calls of all hooks of a short job."""
    model, optimizer = job(make)
    calls: list[Any] = []
    optimizer.register_step_pre_hook(lambda *arguments: calls.append("before step"))
    optimizer.register_step_post_hook(
        lambda *arguments: calls.append(("after step", model.weight.sum().item()))
    )
    optimizer.register_state_dict_pre_hook(
        lambda own: calls.append("before state dict")
    )
    optimizer.register_state_dict_post_hook(
        lambda own, state: calls.append(summary(state))
    )
    optimizer.register_state_dict_post_hook(
        lambda own, state: calls.append(summary(state)), prepend=True
    )

    def without_second(own: Any, state: dict[str, Any]) -> dict[str, Any]:
        calls.append(summary(state))
        return {"param_groups": state["param_groups"], "state": {0: state["state"][0]}}

    optimizer.register_load_state_dict_pre_hook(without_second)
    optimizer.register_load_state_dict_post_hook(
        lambda own: calls.append(len(own.state))
    )
    train(model, optimizer)
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    calls.append(len(saved["state"]))
    return calls


def test_hooks__are_called_as_those_of_torch() -> None:
    ours, theirs = (
        record_calls(ebbtide),
        record_calls(lambda params: torch.optim.AdamW(params, lr=1e-3)),
    )
    assert [type(call) for call in ours] == [type(call) for call in theirs]
    for own, other in zip(ours, theirs, strict=True):
        assert own == (pytest.approx(other) if isinstance(other, tuple) else other)


def test_state_dict__is_what_its_post_hook_returns() -> None:
    model, optimizer = job(lambda params: ebbtide(params, loss_scale="dynamic"))
    optimizer.register_state_dict_post_hook(
        lambda own, state: {**state, "names": sorted(state)}
    )
    optimizer.register_state_dict_post_hook(
        lambda own, state: {**state, "count": len(state)}
    )
    train(model, optimizer)
    saved = optimizer.state_dict()
    assert saved["names"] == ["ebbtide", "loss_scale", "param_groups", "state"]
    assert saved["count"] == 5
    assert "exp_avg" in saved["state"][0]
    optimizer.close()


def test_commit__is_complete_when_hooks_see_it(tmp_path: Path) -> None:
    model, optimizer = job(
        lambda params: ebbtide(params, storage=tmp_path, host_memory_budget=1e6)
    )
    seen: list[list[str]] = []
    optimizer.register_state_dict_post_hook(
        lambda own, state: seen.append(sorted(state))
    )
    train(model, optimizer)
    optimizer.commit()
    assert seen == [["ebbtide", "param_groups", "state", "storage"]]
    optimizer.close()
