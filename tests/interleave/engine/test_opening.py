"""Optimizers that are made before the model is where it will be trained: the device is
opened at the first use."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ebbtide.interleave.engine.adaptive import runner
from ebbtide.interleave.engine.devices.emulated import EmulatedDevice
from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.interleaved_adamw import InterleavedAdamW
from ebbtide.interleave.engine.params import offloaded_params
from tests.conftest import slow
from tests.interleave.engine.jobs import closing
from tests.interleave.engine.training import (
    MODES,
    Job,
    ReferenceOptimizer,
    finish,
    maker,
)
from tests.interleave.engine.twins import no_thread_left


class Opened(Exception):
    pass


def test_step__opens_the_gpu_that_the_model_was_moved_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With fake tensors: only the choice of the device is real."""

    def opened(device: torch.device) -> None:
        raise Opened(device)

    monkeypatch.setattr(runner, "open_device", opened)
    with FakeTensorMode():
        model = torch.nn.Linear(4, 4)
        optimizer = InterleavedAdamW(model.parameters(), policy="gpu-only")
        # accelerate does this when it prepares an optimizer.
        optimizer.load_state_dict(optimizer.state_dict())
        for param in model.parameters():
            param.fake_device = torch.device("cuda", 1)
            param.grad = torch.zeros_like(param)
        with pytest.raises(Opened) as error:
            optimizer.step()
    assert error.value.args == (torch.device("cuda", 1),)
    optimizer.close()


class Places:
    """Simulates a model that moves: gives the device that its parameters seem to be on,
    and emulated devices."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current = torch.device("cpu")
        self.opened: list[tuple[torch.device, EmulatedDevice]] = []
        layouts = offloaded_params._layouts
        monkeypatch.setattr(offloaded_params, "device_of", lambda params: self.current)
        monkeypatch.setattr(runner, "open_device", self._open)
        monkeypatch.setattr(
            offloaded_params,
            "_layouts",
            lambda params: [(self.current, *layout[1:]) for layout in layouts(params)],
        )

    def _open(self, _: torch.device) -> EmulatedDevice:
        device = EmulatedDevice()
        self.opened.append((self.current, device))
        return device


@pytest.mark.parametrize("mode", MODES)
def test_step__works_after_the_model_has_moved(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job()
    expected = five_steps(job, ReferenceOptimizer(job.net.parameters()))
    places, job = Places(monkeypatch), Job()
    with no_thread_left():
        optimizer = maker("interleaved:2", mode)(job.net.parameters())
        assert places.opened == []
        places.current = torch.device("cuda", 0)
        assert five_steps(job, optimizer) == expected
        gc.collect()
    assert [device for device, _ in places.opened] == [torch.device("cuda", 0)]
    assert places.opened[0][1].peak_bytes > 0
    assert places.opened[0][1].used_bytes == 0


def five_steps(job: Job, optimizer: Any) -> Any:
    for _ in range(5):
        job.step(optimizer)
    return finish(job, optimizer)


@pytest.mark.parametrize(
    "early_use",
    [
        lambda optimizer: optimizer.plan,
        # It measures the rates of this machine.
        pytest.param(lambda optimizer: optimizer.machine, marks=pytest.mark.slow),
    ],
)
def test_step__opens_the_device_again_after_an_early_use(
    early_use: Callable[[InterleavedAdamW], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job()
    expected = five_steps(job, ReferenceOptimizer(job.net.parameters()))
    places, job = Places(monkeypatch), Job()
    with no_thread_left():
        optimizer = maker("gpu-only", "kept")(job.net.parameters())
        early_use(optimizer)
        places.current = torch.device("cuda", 0)
        assert five_steps(job, optimizer) == expected
        gc.collect()
    assert [device for device, _ in places.opened] == [
        torch.device("cpu"),
        torch.device("cuda", 0),
    ]
    assert all(device.used_bytes == 0 for _, device in places.opened)


def test_step__keeps_loaded_state_if_the_model_moves_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def resumed(move: Callable[[], None]) -> Any:
        job = Job()
        optimizer = maker("interleaved:2", "kept")(job.net.parameters())
        for _ in range(3):
            job.step(optimizer)
        saved = optimizer.state_dict()
        optimizer.close()
        optimizer = maker("interleaved:2", "kept")(job.net.parameters())
        optimizer.load_state_dict(saved)
        move()
        return five_steps(job, optimizer)

    expected = resumed(lambda: None)
    places = Places(monkeypatch)

    def to_gpu() -> None:
        places.current = torch.device("cuda", 0)

    assert resumed(to_gpu) == expected


def test_step__follows_a_dtype_that_changes_before_it() -> None:
    job = Job(torch.float32)
    job.net.bfloat16()
    expected = five_steps(cast(job), ReferenceOptimizer(job.net.parameters()))
    for early_use in (False, True):
        job = Job(torch.float32)
        optimizer = maker("interleaved:2", "kept")(job.net.parameters())
        if early_use:
            assert optimizer.plan
        job.net.bfloat16()
        assert five_steps(cast(job), optimizer) == expected


def cast(job: Job) -> Job:
    """Let a job of fp32 give its batches as bfloat16."""
    batches = job._batches
    job._batches = ((inputs.bfloat16(), targets) for inputs, targets in batches)
    return job


def test_step__refuses_parameters_that_moved_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    places, job = Places(monkeypatch), Job()
    with closing(maker("gpu-only", "kept")(job.net.parameters())) as optimizer:
        job.step(optimizer)
        before = job.outcome()
        places.current = torch.device("cuda", 0)
        with pytest.raises(
            EngineError, match=r"on cpu when .* on cuda:0 now.*state_dict"
        ) as error:
            optimizer.step()
        assert "\n" not in str(error.value)
        assert job.outcome() == before
        # Back again: the job goes on.
        places.current = torch.device("cpu")
        job.step(optimizer)


def test_load_state_dict__a_new_optimizer_does_not_open_a_device_for_an_empty_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    places, job = Places(monkeypatch), Job()
    with closing(maker("gpu-only", "kept")(job.net.parameters())) as optimizer:
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})
        assert optimizer.last_schedule is None
        assert places.opened == []


def test_close__of_an_optimizer_that_never_opened_refuses_a_step() -> None:
    job = Job()
    with no_thread_left():
        optimizer = maker("gpu-only", "kept")(job.net.parameters())
        optimizer.close()
        with pytest.raises(EngineError, match="closed"):
            job.step(optimizer)


def test_step__runs_a_closure_and_returns_its_loss() -> None:
    job = Job()
    expected = five_steps(job, ReferenceOptimizer(job.net.parameters()))
    job = Job()
    optimizer = maker("interleaved:2", "kept")(job.net.parameters())

    def closure() -> float:
        job.net.zero_grad()
        loss = job.loss()
        loss.backward()
        return float(loss.item())

    with torch.no_grad():
        losses = [optimizer.step(closure) for _ in range(5)]
    assert losses == job.losses
    assert finish(job, optimizer) == expected


@pytest.mark.parametrize("mode", slow(MODES, but=["streamed"]))
def test_step__inside_a_compiled_function(mode: str) -> None:
    """torch.compile leaves the step and the hooks alone."""
    job = Job()
    expected = five_steps(job, ReferenceOptimizer(job.net.parameters()))
    job = Job()
    optimizer = maker("interleaved:2", mode)(job.net.parameters())

    @torch.compile(backend="eager")
    def train(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = ((job.net(inputs, 0).float() - targets) ** 2).mean()
        loss.backward()
        optimizer.step()
        return loss

    for _ in range(5):
        job.losses.append(train(*next(job._batches)).item())
    assert finish(job, optimizer) == expected


def test_step__accepts_weights_in_channels_last_order() -> None:
    """The bits are those of the same weights in the usual order."""

    def trained(
        memory_format: torch.memory_format, mode: str
    ) -> tuple[list[torch.Tensor], dict[str, Any]]:
        torch.manual_seed(0)
        model = torch.nn.Conv2d(3, 5, 3).to(memory_format=memory_format)
        with closing(
            maker("interleaved:2", mode, subgroup_params=40)(model.parameters())
        ) as optimizer:
            for step in range(4):
                model.zero_grad()
                for _ in range(1 + step % 2):
                    generator = torch.Generator().manual_seed(step)
                    # Gradients of one order, whatever convolution returns.
                    upstream = torch.randn(5, 3, 3, 3, generator=generator)
                    ((model.weight * upstream).sum() + model.bias.sum()).backward()
                optimizer.step()
            return [
                param.detach().clone() for param in model.parameters()
            ], optimizer.state_dict()

    usual, usual_state = trained(torch.contiguous_format, "kept")
    for mode in MODES:
        params, state = trained(torch.channels_last, mode)
        assert not params[0].is_contiguous()
        for param, expected in zip(params, usual, strict=True):
            assert torch.equal(param, expected)
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(state["state"][0][name], usual_state["state"][0][name])
