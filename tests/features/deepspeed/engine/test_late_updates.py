"""ZeRO-3 with updates under the next forward: the bits of `enable` without overlap,
whatever the job reads when."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from ebbtide.interleave.deepspeed import enable
from ebbtide.interleave.engine.devices.emulated import EmulatedDevice
from ebbtide.interleave.engine.errors import EngineError
from tests.conftest import slow_case

from .training import batches, config, digest, engine, loss_of, replace_update, train

LATE = "pipelined,overlap=forward"


def read_at_steps(running: Any, steps: int) -> list[Any]:
    """Train, and return the losses and what is read after each step in another way."""
    from deepspeed import utils, zero

    weight, bias = running.module.blocks[2][0].weight, running.module.head.bias
    readings: list[Any] = []
    for step in range(steps):
        readings += train(running, 1, seed=step)
        if step == 2:
            with zero.GatheredParameters([weight, bias]):
                readings.append(
                    (weight.float().sum().item(), bias.float().sum().item())
                )
        elif step == 3:
            readings.append(utils.safe_get_full_fp32_param(weight).sum().item())
        elif step == 4:
            with torch.no_grad():
                readings.append(loss_of(running, next(batches(running, 1))).item())
        elif step == 5:
            readings.append(
                utils.safe_get_full_optimizer_state(weight, "exp_avg").sum().item()
            )
        elif step == 6:
            with zero.GatheredParameters([weight, bias], modifier_rank=0):
                bias.data.add_(1)
    return readings


@pytest.mark.parametrize(
    ("policy", "accumulate"), [("interleaved:2", 2), slow_case("adaptive", 1)]
)
def test_step__gives_the_bits_of_steps_without_overlap(
    deepspeed: Any, policy: str, accumulate: int
) -> None:
    results = []
    for overlap in ("none", "forward"):
        with engine(policy, config("bf16", accumulate), overlap=overlap) as running:
            results.append((read_at_steps(running, 9), digest(running)))
    assert results[0] == results[1]


@pytest.mark.parametrize("has_gates", [True, slow_case(False)])
def test_forward__waits_for_what_it_gathers(deepspeed: Any, has_gates: bool) -> None:
    """Small parameters too, which DeepSpeed gathers at the end of each step; without
    gates it reads old values."""
    losses = []
    for policy in ("pipelined", LATE):
        with engine(policy, config("fp32")) as running:
            train(running, 2)
            running.optimizer.synchronize()
            released = threading.Event()
            if policy == LATE:
                replace_update(running, lambda released=released: released.wait(30))
            if policy == LATE and not has_gates:
                for gate in running.optimizer._gates:
                    gate.remove()
            train(running, 1, seed=3)
            if policy == LATE:
                # Nothing has waited for the updates, all of which wait for `released`.
                assert running.optimizer._runner.engine.is_late
            if has_gates:
                threading.Timer(0.1, released.set).start()
            losses.append(loss_of(running, next(batches(running, 1))).item())
            released.set()
    assert (losses[0] == losses[1]) == has_gates


@pytest.mark.slow
def test_step__goes_on_after_an_operation_failed_under_the_forward(
    deepspeed: Any,
) -> None:
    digests = []
    for fails in (False, True):
        device = EmulatedDevice()
        copy, failing = device.copy, iter([fails])

        def fail_once(
            direction: Any, pairs: Any, copy: Any = copy, failing: Any = failing
        ) -> None:
            if direction == "h2d" and next(failing, False):
                raise RuntimeError("the copy failed")
            copy(direction, pairs)

        with engine(LATE, config("bf16"), device=device) as running:
            train(running, 2)
            running.optimizer.synchronize()
            device.copy = fail_once  # type: ignore[method-assign]
            train(running, 1, seed=3)
            if fails:
                with pytest.raises(
                    EngineError,
                    match="the copy failed; the step was completed on the CPU",
                ):
                    running.optimizer.synchronize()
            train(running, 2, seed=4)
            digests.append(digest(running))
    assert digests[0] == digests[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"policy": "pipelined", "overlap": "backward"},
            "updates inside the backward are not supported with DeepSpeed",
        ),
        ({"policy": "pipelined", "overlap": "update"}, "overlap is 'update'"),
        (
            {"policy": "pipelined,overlap=both"},
            "updates inside the backward are not supported with DeepSpeed",
        ),
        (
            {"policy": "pipelined,overlap=none", "overlap": "forward"},
            "must not contradict each other",
        ),
    ],
)
def test_enable__refuses_other_overlaps(
    deepspeed: Any, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(EngineError, match=message):
        enable(**arguments, beside=True)
