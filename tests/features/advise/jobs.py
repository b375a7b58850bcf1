"""Jobs and machines to plan for in tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ebbtide.features.advise.job.decoder import shape_of
from ebbtide.features.advise.job.sources import BatchSettings, job_of_size
from ebbtide.features.advise.job.training_job import TrainingJob
from ebbtide.machines.machine import Machine
from tests.interleave.job_files import machine

GPU = {
    "flops_per_s": {"bfloat16": 300e12},
    "memory_bytes_per_s": 2e12,
    "peer_bytes_per_s": 300e9,
}
BOX = {"ranks": 8, "cpu_update_params_per_s": 8e9, "host_memory_bytes_per_s": 400e9}


def sized(
    params: float = 2e9,
    ranks: int = 1,
    micro_batch: int = 1,
    checkpointing: bool = False,
) -> TrainingJob:
    """Return a job of a size, in a few subgroups."""
    job = job_of_size(
        shape_of(int(params), 2048, 50_000),
        BatchSettings(ranks, micro_batch),
        checkpointing,
    )
    return replace(job, workload=replace(job.workload, subgroup_params=int(params / 4)))


def gpu_machine(**changes: Any) -> Machine:
    """Return a machine with peak rates and eight ranks on a host."""
    return machine(**({"gpu": GPU, "box": BOX} | changes))
