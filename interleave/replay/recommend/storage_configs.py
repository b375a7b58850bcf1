"""Configurations of DeepSpeed for other systems that keep state in storage."""

from __future__ import annotations

from math import ceil
from typing import Any

from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies import parse
from ebbtide.interleave.policies.systems.zero_infinity import BUFFERS_OF_SUBGROUP
from ebbtide.interleave.replay.recommend.configuration import deepspeed_config
from ebbtide.interleave.replay.recommend.recorded_job import RecordedJob
from ebbtide.interleave.simulation.steps import Steps
from ebbtide.machines.machine import Machine
from ebbtide.state_bytes import MASTER_BYTES

# Stands for a folder that the machine file does not name.
_FOLDER = "/local_nvme"
# Gradients of fewer bytes than a block are not written, and neither is state.
_BLOCK_BYTES = 2 * 2**20


def zero_infinity_config(steps: Steps, workload: Workload, job: RecordedJob, machine: Machine) -> dict[str, Any]:
    """Return the configuration of DeepSpeed for the policy `zero-infinity`."""
    plan = steps.valid.plan
    spec = parse(plan.policy)
    path = next(op.path for op in plan.ops if op.kind == "read")
    # A block as large as the smallest subgroup: larger than all gradients, unless one is a subgroup of its own.
    whole_subgroup = MASTER_BYTES * min(workload.subgroups)
    block_bytes = whole_subgroup if spec.options["gradients"] == "device" else _BLOCK_BYTES
    config = deepspeed_config(workload, job, 1.0)
    config["zero_optimization"]["offload_optimizer"] = {
        "device": "nvme",
        "nvme_path": machine.storage[path].path or _FOLDER,
        "pin_memory": True,
        "buffer_count": int(float(spec.value or BUFFERS_OF_SUBGROUP)),
        "pipeline_read": spec.options["pipeline_read"] == "true",
        "pipeline_write": spec.options["pipeline_write"] == "true",
    }
    return {**config, "aio": {"block_size": block_bytes}}


def mlp_offload_config(steps: Steps, workload: Workload, job: RecordedJob, machine: Machine) -> dict[str, Any]:
    """Return the configuration of MLP-Offload's DeepSpeed, with `dist_opt_ratio` as its authors ran it."""
    plan = steps.valid.plan
    in_memory = plan.subgroups - len(plan.stored) + len(plan.storage_buffers)
    folders = [path.path or f"{_FOLDER}{number or ''}" for number, path in enumerate(machine.storage)]
    config = deepspeed_config(workload, job, 1.0)
    config["zero_optimization"]["offload_optimizer"] = {
        "device": "nvme",
        "nvme_path": ";".join(folders),
        "pin_memory": True,
        # Each path has so many.
        "buffer_count": ceil(BUFFERS_OF_SUBGROUP * in_memory / max(1, len(folders))),
        "pipeline_read": True,
        "pipeline_write": True,
        "dist_opt_enable_caching": 1,
        "dist_opt_grad_skip": 1,
        "dist_opt_ratio": 3,
        "dist_opt_one_at_time": 1,
    }
    return {**config, "aio": {"block_size": _BLOCK_BYTES}}
