"""Errors of the DeepSpeed integration: each is one line, and nothing stays behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ebbtide.errors import UserError
from ebbtide.features.deepspeed.engine import supported
from ebbtide.interleave.deepspeed import disable, enable
from ebbtide.interleave.engine.devices.emulated import EmulatedDevice
from ebbtide.interleave.engine.errors import EngineError
from tests.conftest import slow_case

from .training import Model, batches, config, digest, engine, loss_of, train


def configured(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    settings = config("bf16")
    change(settings)
    return settings


def set_zero(**changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda settings: settings["zero_optimization"].update(changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_zero(stage=2), "stage 3.*stage 2"),
        (set_zero(stage=0, offload_optimizer=None), "stage 3.*stage 0"),
        (set_zero(offload_optimizer=None), "not offloaded.*offload_optimizer"),
        (set_zero(offload_param={"device": "cpu"}), "ZeRO-Infinity"),
        (
            set_zero(offload_optimizer={"device": "nvme", "nvme_path": "/tmp"}),
            "ZeRO-Infinity",
        ),
        (
            set_zero(offload_optimizer={"device": "cpu", "super_offload": True}),
            "SuperOffload",
        ),
        (
            lambda settings: settings["optimizer"]["params"].update(
                bias_correction=False
            ),
            "bias_correction",
        ),
        (
            lambda settings: settings["optimizer"]["params"].update(
                fp32_optimizer_states=False
            ),
            "fp32_optimizer_states",
        ),
    ],
)
def test_initialize__refuses_configurations_that_are_not_supported(
    deepspeed: Any, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    with (
        pytest.raises(UserError, match=message) as error,
        engine("adaptive", configured(change)),
    ):
        pass
    assert "\n" not in str(error.value)


def test_check_optimizer__refuses_other_optimizers() -> None:
    weights = [torch.nn.Parameter(torch.zeros(3))]
    for optimizer in (
        torch.optim.SGD(weights, lr=0.1),
        torch.optim.AdamW(weights, amsgrad=True),
        torch.optim.Adam(weights, decoupled_weight_decay=True),
    ):
        with pytest.raises(
            EngineError,
            match=r"SGD.*AdamW|(amsgrad|decoupled_weight_decay) is not supported",
        ):
            supported.rules_of(optimizer)
    (rule,) = supported.rules_of(torch.optim.AdamW(weights, fused=True))
    assert rule.name == "adamw"


def test_enable__refuses_versions_that_are_not_tested(
    deepspeed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in ("0.14.0", "1.0.0", "0.20.1+abc"):
        monkeypatch.setattr(supported, "version", lambda name, version=version: version)
        with pytest.raises(EngineError, match=r"0\.19\.8"):
            enable()


def test_enable__refuses_to_be_called_after_initialize(deepspeed: Any) -> None:
    with (
        engine(None, config("bf16")),
        pytest.raises(EngineError, match=r"before deepspeed\.initialize"),
    ):
        enable()


def test_enable__refuses_invalid_arguments(deepspeed: Any) -> None:
    for arguments, message in (
        ({"policy": "best"}, "no policy"),
        ({"subgroup_params": 0}, "subgroup_params"),
        ({"memory_budget": -1.0}, "memory_budget"),
    ):
        with pytest.raises(UserError, match=message):
            enable(**arguments, beside=True)


def test_disable__restores_deepspeed(deepspeed: Any) -> None:
    """After `with`, after `disable`, and after an engine that could not be created."""
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero import stage3

    theirs = DeepSpeedEngine._configure_optimizer, stage3.DeepSpeedZeroOptimizer_Stage3
    with enable("pipelined", beside=True):
        enable("adaptive", beside=True)
        model = Model()
        with pytest.raises(EngineError):
            deepspeed.initialize(
                model=model,
                model_parameters=model.parameters(),
                config=configured(set_zero(stage=2)),
            )
        assert stage3.DeepSpeedZeroOptimizer_Stage3 is theirs[1]
    assert (
        DeepSpeedEngine._configure_optimizer,
        stage3.DeepSpeedZeroOptimizer_Stage3,
    ) == theirs
    disable()
    with engine(None, config("bf16")) as running:
        assert type(running.optimizer) is theirs[1]


class Broken(RuntimeError):
    pass


class Breaking(EmulatedDevice):
    """An emulated device of which one copy fails."""

    after = -1

    def copy(self, *args: Any) -> None:
        self.after -= 1
        if self.after == 0:
            raise Broken("the link")
        super().copy(*args)


@pytest.mark.slow
@pytest.mark.parametrize("after", [slow_case(1), 4, slow_case(9)])
def test_step__is_completed_after_a_failed_copy(deepspeed: Any, after: int) -> None:
    digests = []
    for breaks in (False, True):
        device = Breaking()
        with engine("interleaved:2", config("bf16"), device=device) as running:
            train(running, 2)
            for batch in batches(running, 1, seed=3):
                running.backward(loss_of(running, batch))
                device.after = after if breaks else -1
                if breaks:
                    with pytest.raises(EngineError, match="completed on the CPU"):
                        running.step()
                    device.after = -1
                else:
                    running.optimizer.step()
            digests.append(digest(running))
    assert digests[0] == digests[1]


@pytest.mark.slow
def test_memory_budget__is_respected(deepspeed: Any) -> None:
    params = sum(param.numel() for param in Model().parameters())
    device = EmulatedDevice(capacity_bytes=12.0 * params)
    with engine(
        "adaptive",
        config("bf16"),
        device=device,
        memory_budget=6.0 * params,
        subgroup_params=2_000,
    ) as running:
        train(running, 4)
        assert 0 < device.peak_bytes <= 6 * params
        exact = digest(running)
    with engine("zero-offload", config("bf16")) as running:
        train(running, 4)
        assert digest(running) == exact
    with (
        pytest.raises(EngineError, match="device memory"),
        engine("gpu-only", config("bf16"), memory_budget=1_000.0),
    ):
        pass


def test_destroy__ends_all_threads(deepspeed: Any) -> None:
    before = set(threading.enumerate())
    with engine("interleaved:2", config("bf16")) as running:
        train(running, 1)
        assert len(set(threading.enumerate()) - before) >= 4
    assert [
        thread.name
        for thread in set(threading.enumerate()) - before
        if thread.name.startswith("ebbtide")
    ] == []


def test_enable__does_not_change_other_engines(deepspeed: Any) -> None:
    """A plain engine of DeepSpeed runs at the same time as one driven by ebbtide."""
    alone = []
    with engine(None, config("bf16")) as plain:
        alone.append(train(plain, 3))
    with (
        engine("pipelined", config("bf16")) as driven,
        engine(None, config("bf16")) as plain,
    ):
        train(driven, 1)
        alone.append(train(plain, 3))
        assert torch.isfinite(torch.tensor(train(driven, 1))).all()
    assert alone[0] == alone[1]
