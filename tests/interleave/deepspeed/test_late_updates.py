"""ZeRO-3 with updates under the next forward: the bits of enable() without overlap, whatever the job reads when."""

from __future__ import annotations

import time
from typing import Any

import deepspeed.utils
import pytest
import torch

from .test_jobs import half_precision
from .training import batches, config, digest, engine, loss_of


def train_late(running: Any, read: bool = True) -> list[Any]:
    """Train with slow updates on the CPU, and return what is read between steps and micro-steps."""
    update = running.optimizer._runner.kernel.update_ranges

    def update_slowly(*arguments: Any) -> None:
        time.sleep(1e-3)
        update(*arguments)

    running.optimizer._runner.kernel.update_ranges = update_slowly
    readings: list[Any] = []
    accumulate = running.gradient_accumulation_steps()
    for number, batch in enumerate(batches(running, 7 * accumulate)):
        loss = loss_of(running, batch)
        readings.append(loss.item())
        running.backward(loss)
        running.step()
        step, is_boundary = divmod(number, accumulate)
        if not read or is_boundary != accumulate - 1:
            continue
        weight, bias = running.module.blocks[2][0].weight, running.module.head.bias
        if step == 2:
            with deepspeed.zero.GatheredParameters([weight, bias]):
                readings.append((weight.float().sum().item(), bias.float().sum().item()))
        elif step == 3:
            readings.append(deepspeed.utils.safe_get_full_fp32_param(weight).sum().item())
        elif step == 4:
            with torch.no_grad():
                readings.append(loss_of(running, batch).item())
        elif step == 5:
            readings.append(deepspeed.utils.safe_get_full_optimizer_state(weight, "exp_avg").sum().item())
    return readings
