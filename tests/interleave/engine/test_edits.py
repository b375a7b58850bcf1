"""Parameters that the job changes itself, also through `.data`: the masters follow, and
nothing is undone."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from ebbtide.interleave.engine.devices.device import Direction
from ebbtide.interleave.engine.devices.emulated import EmulatedDevice
from ebbtide.interleave.engine.interleaved_adamw import InterleavedAdamW
from ebbtide.interleave.engine.optimizer import InterleavedOptimizer
from ebbtide.interleave.engine.runtime.engine import Engine
from ebbtide.interleave.engine.runtime.subgroup_states import SubgroupStates
from tests.interleave.engine.training import MODES, Job, maker


def forbidden(*_: object) -> None:
    raise AssertionError


def test_step__reads_only_the_masters_of_subgroups_that_the_job_has_edited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    params = [torch.nn.Parameter(torch.ones(100).bfloat16()) for _ in range(5)]
    optimizer = InterleavedAdamW(params, policy="zero-offload", subgroup_params=100)

    def step() -> None:
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()

    step()
    touched: list[tuple[str, int]] = []
    for name in ("read", "write", "edited_masters"):
        method = getattr(SubgroupStates, name)

        def recorded(
            states: SubgroupStates,
            subgroup: int,
            *state: Any,
            name: str = name,
            method: Any = method,
        ) -> Any:
            touched.append((name, subgroup))
            return method(states, subgroup, *state)

        monkeypatch.setattr(SubgroupStates, name, recorded)
    step()
    assert touched == []
    params[3].data.clamp_(0.0, 0.5)
    step()
    assert touched == [("edited_masters", 3), ("read", 3)]
    optimizer.close()


class CountingDevice(EmulatedDevice):
    """An emulated device that notes the target and size of each copy."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[tuple[Direction, torch.Tensor]] = []

    def copy(
        self, direction: Direction, pairs: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        self.copies += [(direction, target) for _, target in pairs]
        super().copy(direction, pairs)


@pytest.mark.parametrize("rule", ["adamw", "adamw-remainder"])
def test_state_on_the_device__moves_only_what_is_edited_and_is_copied_once(
    rule: str,
) -> None:
    """Three parameters share a subgroup, whose state stays on the device."""
    params = [
        torch.nn.Parameter(torch.ones(size).bfloat16()) for size in (5000, 7, 4000)
    ]
    with contextlib.closing(CountingDevice()) as device:
        optimizer = InterleavedOptimizer(
            params, rule, policy="gpu-only", device=device, threads=1
        )

        def step() -> None:
            for param in params:
                param.grad = torch.ones_like(param)
            device.copies.clear()
            optimizer.step()

        step()
        step()
        assert not device.copies
        params[1].data.fill_(0.25)
        step()
        assert [(direction, len(target)) for direction, target in device.copies] == [
            ("d2h", 7),
            ("h2d", 7),
        ]
        device.copies.clear()
        saved = optimizer.state_dict()["state"]
        reached = {target.untyped_storage().data_ptr() for _, target in device.copies}
        names = ("exp_avg", "exp_avg_sq", *(["master"] if rule == "adamw" else []))
        for entry in saved.values():
            assert all(
                entry[name].untyped_storage().data_ptr() in reached for name in names
            )
        optimizer.close()


@pytest.mark.parametrize("mode", MODES)
def test_step__an_edited_parameter_does_not_stop_the_plan(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """State that is on the device and gradients that are offloaded stay where they
    are."""
    stops: list[Engine] = []
    monkeypatch.setattr(Engine, "quiesce", lambda engine: stops.append(engine))
    job = Job()
    optimizer = maker("interleaved:2", mode)(job.net.parameters())
    for step in range(5):
        job.step(optimizer)
        job.net.late.weight.data.view(-1)[step] = 0.5
        if not step:
            # The engine was opened, and a first plan set.
            stops.clear()
    assert not stops
    monkeypatch.undo()
    optimizer.close()
