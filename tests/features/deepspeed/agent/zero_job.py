"""A small DeepSpeed job, run as a script: trains the cases of a JSON file.

Keys of a case: name, config (of DeepSpeed), steps, and optionally groups (two parameter
groups), accumulation, checkpointing, torch_style (`loss.backward()`), unmanaged (the
script owns the boundary), lifted (`lift_device_checks`), spike (an iteration, from 0,
whose loss is infinite), width (of the model), load and save (folders of checkpoints),
after (code to run at the end). If the file names a folder, each case is first trained
without recording, and then recorded into a trace there.
"""

from __future__ import annotations

import functools
import gc
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import cpuinfo
import deepspeed
import deepspeed.accelerator
import deepspeed.runtime.zero.muon.muon_optimizer
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.superoffload import superoffload_stage3, superoffload_utils
from deepspeed.runtime.swap_tensor import (
    async_swapper,
    partitioned_optimizer_swapper,
    pipelined_optimizer_swapper,
)
from deepspeed.runtime.swap_tensor.utils import SwapBufferManager
from deepspeed.runtime.zero import stage3, stage_1_and_2
from torch import nn
from torch.utils.checkpoint import checkpoint

# DeepSpeed collects garbage for each engine: what is imported is none. Engines import
# the optimizer of Muon, and that torch's compiler.
gc.freeze()
# DeepSpeed calls it whenever it creates its CPU Adam, and it takes a second.
cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)

WIDTH = 256


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self, checkpointing: bool, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))
        self.checkpointing = checkpointing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = (
                checkpoint(block, x, use_reentrant=False)
                if self.checkpointing
                else block(x)
            )
        return x.float().square().mean()


def train(case: dict[str, Any]) -> list[str]:
    """Train a case; return how many steps were skipped, and the exact losses in
    hexadecimal."""
    if case.get("lifted"):
        from tests.features.deepspeed.agent.cpu_accelerator import lift_device_checks

        lift_device_checks()
    torch.manual_seed(0)
    width = case.get("width", WIDTH)
    net = Net(case.get("checkpointing", False), width)
    groups: Any = net.parameters()
    if case.get("groups"):
        groups = [
            {"params": list(part.parameters()), "lr": 1e-3}
            for part in (net.blocks[:1], net.blocks[1:])
        ]
    engine, *_ = deepspeed.initialize(
        model=net, model_parameters=groups, config=case["config"]
    )
    if "load" in case:
        engine.load_checkpoint(case["load"])
    dtype = next(engine.module.parameters()).dtype
    generator = torch.Generator().manual_seed(deepspeed.comm.get_rank())
    losses = []
    for step in range(case["steps"]):
        for _ in range(case.get("accumulation", 1)):
            loss = engine(torch.randn(4, width, generator=generator).to(dtype))
            if case.get("spike") == step:
                loss = loss * float("inf")
            if case.get("torch_style"):
                loss.backward()
            else:
                engine.backward(loss)
            if not case.get("unmanaged"):
                engine.step()
        if case.get("unmanaged"):
            engine.step()
        losses.append(loss.item().hex())
    if "save" in case and not Path(case["save"]).exists():
        engine.save_checkpoint(case["save"])
    skipped = engine.skipped_steps
    engine.destroy()
    return [str(skipped), *losses]


def _methods() -> list[dict[str, Any]]:
    """Return the attributes of everything that the recorder wraps."""
    owners = (
        *(
            DeepSpeedEngine,
            stage3.DeepSpeedZeroOptimizer_Stage3,
            stage_1_and_2.DeepSpeedZeroOptimizer,
            stage_1_and_2,
        ),
        *(superoffload_stage3.SuperOffloadOptimizer_Stage3, superoffload_utils),
        superoffload_utils.SuperOffloadCPUOptimizer,
        *(
            async_swapper,
            partitioned_optimizer_swapper,
            pipelined_optimizer_swapper,
            SwapBufferManager,
        ),
    )
    return [dict(vars(owner)) for owner in owners]


def _tracer(path: Path) -> Any:
    from ebbtide.profiler import Tracer

    return Tracer(path)


def main() -> None:
    job = json.loads(Path(sys.argv[-1]).read_text())
    cases, folder = job["cases"], job.get("folder")
    torch.set_num_threads(1)
    # DeepSpeed allows float16 only where it is fast; it works on any CPU.
    type(deepspeed.accelerator.get_accelerator()).is_fp16_supported = lambda self: True
    deepspeed.init_distributed("gloo")
    untouched = _methods()
    for case in cases:
        for traced in (False, True) if folder else (False,):
            with (
                _tracer(Path(folder, f"{case['name']}.ebb"))
                if folder and traced
                else nullcontext()
            ):
                losses = train(case)
            assert folder is None or _methods() == untouched
            print(
                "LOSSES",
                case["name"],
                deepspeed.comm.get_rank(),
                " ".join(losses),
                flush=True,
            )
    exec(cases[-1].get("after", ""), {})
    deepspeed.comm.destroy_process_group()


if __name__ == "__main__":
    main()
