"""The lines to paste for a plan: a configuration of DeepSpeed, FSDP2 calls, and the optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ebbtide.interleave.model.schedule import Schedule
from ebbtide.interleave.provisioning.training_job import TunableSettings
from ebbtide.interleave.replay.recommend.calls import optimizer_code
from ebbtide.interleave.replay.recommend.configuration import LEARNING_RATE
from ebbtide.interleave.replay.recommend.recorded_job import RecordedJob
from ebbtide.interleave.replay.recommend.setups import machine_code, setup_of
from ebbtide.machines.machine import Machine

_ADAMW = f"optimizer = torch.optim.AdamW(model.parameters(), lr={LEARNING_RATE!r}, fused=True)"
_CHECKPOINTING = """from torch.distributed._composable import checkpoint

for layer in model.layers:  # the list of blocks of your model
    checkpoint(layer)"""


@dataclass(frozen=True)
class LinesToPaste:
    """The lines to paste for a plan.

    Attributes:
        python: Lines of Python for the framework of the job: for DeepSpeed those before `deepspeed.initialize`, else
            those that make the optimizer, with FSDP2 if there are several ranks.
        deepspeed_config: A configuration that `deepspeed.initialize` accepts.
        deepspeed_code: Lines for a job of DeepSpeed, before `deepspeed.initialize`; None if the configuration suffices.
        checkpointing: Lines that switch on activation checkpointing; None without it.
        fsdp2: Lines that shard the model; None with one rank.
        optimizer: Lines that make the optimizer of a job without DeepSpeed.
    """

    python: str
    deepspeed_config: dict[str, Any]
    deepspeed_code: str | None
    checkpointing: str | None
    fsdp2: str | None
    optimizer: str


def lines_to_paste(
    schedule: Schedule, job: RecordedJob, settings: TunableSettings, machine: Machine, machine_source: str | None
) -> LinesToPaste:
    """Return the lines to paste for a schedule.

    Args:
        schedule: The schedule of the policy.
        job: Settings of the job that the lines repeat.
        settings: Ranks, micro-batch and checkpointing.
        machine: The machine that the plan was made for.
        machine_source: Its file or preset; None if the job is to measure it.
    """
    setup = setup_of(schedule, job, machine, machine_source)
    config = dict(setup.deepspeed_config)
    if settings.micro_batch is not None:
        config["train_micro_batch_size_per_gpu"] = settings.micro_batch
        config["gradient_accumulation_steps"] = job.micro_steps or 1
        config.pop("train_batch_size", None)
    offloads = schedule.plan.policy != "gpu-only"
    fsdp2 = _fsdp2(half=offloads) if settings.ranks > 1 else None
    if offloads:
        optimizer = optimizer_code(schedule, job, machine, machine_code(machine, machine_source))
    else:
        optimizer = _ADAMW if fsdp2 is not None else f"import torch\n\n{_ADAMW}"
    checkpointing = _CHECKPOINTING if settings.checkpointing else None
    # Without DeepSpeed where state is in storage, and its parameters are offloaded, too.
    if job.section("zero_optimization") and (setup.code is not None or not setup.uses_storage):
        python = setup.code or f"deepspeed_config = {config!r}"
    else:
        python = "\n\n".join(part for part in (checkpointing, fsdp2, optimizer) if part is not None)
    return LinesToPaste(python, config, setup.code, checkpointing, fsdp2, optimizer)


def _fsdp2(half: bool) -> str:
    """Return the lines that shard a model. half: its parameters are in bf16, and the optimizer has fp32 masters."""
    loop = "for layer in model.layers:  # the list of blocks of your model"
    if half:
        return "\n".join(
            [
                "import torch",
                "from torch.distributed.fsdp import fully_shard",
                "",
                "model = model.to(torch.bfloat16)",
                loop,
                "    fully_shard(layer)",
                "fully_shard(model)",
            ]
        )
    return "\n".join(
        [
            "import torch",
            "from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard",
            "",
            "precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)",
            loop,
            "    fully_shard(layer, mp_policy=precision)",
            "fully_shard(model, mp_policy=precision)",
        ]
    )
