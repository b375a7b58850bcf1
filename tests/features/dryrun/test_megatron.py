"""Phases of Megatron-core's optimizers, in dry runs and recordings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ebbtide.profiler import Tracer
from ebbtide.profiler.trace import open_trace
from tests.features.dryrun.forked import run_forked
from tests.features.dryrun.test_session import BATCH, WIDTH, dry_run

MEGATRON = {
    "pipeline_parallel/schedules.py": """
from torch.autograd.variable import Variable

def custom_backward(output, gradient):
    Variable._execution_engine.run_backward((output,), (gradient,), False, False, (), True, True)
""",
    "optimizer/optimizer.py": """
class ChainedOptimizer:
    def __init__(self, optimizers):
        self.chained_optimizers = optimizers

    def step(self):
        for part in self.chained_optimizers:
            part.step()

class FP32Optimizer:
    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self):
        self.optimizer.step()
""",
}


@pytest.mark.parametrize("is_recorded", [False, True], ids=["dry run", "recorded"])
def test_phases_of_megatron__are_its_own_backward_and_one_update(
    is_recorded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in MEGATRON.items():
        file = tmp_path / "megatron" / "core" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)

    def job(device: str = "cuda", steps: int = 9) -> None:
        from megatron.core.optimizer import optimizer as optimizers  # type: ignore[import-not-found]
        from megatron.core.pipeline_parallel import schedules  # type: ignore[import-not-found]

        model = nn.Linear(WIDTH, WIDTH).to(device)
        parts = [
            optimizers.FP32Optimizer(torch.optim.SGD([weight]))
            for weight in model.parameters()
        ]
        optimizer = optimizers.ChainedOptimizer(parts)
        for _ in range(steps):
            output = model(torch.ones(BATCH, WIDTH, device=device))
            schedules.custom_backward(output, torch.ones_like(output))
            optimizer.step()

    def observe() -> Any:
        if not is_recorded:
            return [
                (phase.phase, phase.iteration)
                for phase in dry_run(job)[0].tracker.phases
            ]
        with Tracer(tmp_path / "run.ebb"):
            job("cpu", 2)
        phases = open_trace(tmp_path / "run.ebb").phases(0)
        return list(zip(phases["phase"], phases["iteration"], strict=True))

    assert run_forked(observe) == [
        (name, number)
        for number in (0, 1)
        for name in ("forward", "backward", "update")
    ]
