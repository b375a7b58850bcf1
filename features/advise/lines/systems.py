"""Other systems in a recommendation: the faster ones, and Megatron-LM's best
fraction."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from ebbtide.analysis.metrics.advice import MIN_GAIN
from ebbtide.features.advise.choice import fastest, fits_memory, planned
from ebbtide.features.advise.lines.fill_in import mark
from ebbtide.features.advise.lines.setups import PasteContext, deepspeed_config
from ebbtide.features.advise.present import NOT_KNOWN, Present
from ebbtide.features.storage.kinds import path_of
from ebbtide.features.systems.on_storage import BUFFERS_OF_SUBGROUP
from ebbtide.interleave.model.schedule import Schedule
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies import ADVISED_SYSTEMS, Policy
from ebbtide.interleave.simulation.simulator import Steps
from ebbtide.machines.machine import Machine
from ebbtide.state_bytes import MASTER_BYTES

# Gradients of fewer bytes than a block are not written, and neither is state.
_BLOCK_BYTES = 2 * 2**20
# Of fractions with the same subgroups the first one is taken.
_FRACTIONS = tuple(step / 20 for step in range(20, 0, -1))


@dataclass(frozen=True)
class SystemSetup:
    """Another system, and the lines that make a job use it."""

    policy: str
    iteration_ms: float
    # Whether it is faster than the recommended policy, or fits where that does not.
    is_faster: bool
    exact: bool
    # How the results differ where they are not exact; None where they are.
    note: str | None
    place: str
    lines: str


def other_systems(
    workload: Workload,
    context: PasteContext,
    best_s: float,
    present: Present = NOT_KNOWN,
) -> tuple[SystemSetup, ...]:
    """Return the systems that fit and beat `best_s`, and Megatron-LM's best fraction;
    exact and fast ones first."""
    limit_s = (1 - MIN_GAIN) * best_s
    fitting = _fitting(ADVISED_SYSTEMS, workload, context.machine)
    faster = [steps for steps in fitting if steps.rating_s < limit_s]
    fractions = [
        Policy.make("megatron-hybrid", f"{fraction:g}", overlap="copies")
        for fraction in _FRACTIONS
    ]
    hybrid = fastest(_fitting(fractions, workload, context.machine))
    if hybrid is not None:
        faster.append(hybrid)
    setups = [
        _setup(steps, context, limit_s)
        for steps in faster
        if present.is_slower_than(steps)
    ]
    return tuple(
        sorted(setups, key=lambda setup: (not setup.exact, setup.iteration_ms))
    )


def _fitting(
    policies: Sequence[Policy], workload: Workload, machine: Machine
) -> list[Steps]:
    """Return the simulated steps of the policies that can plan the workload, and are
    known to fit."""
    capacity = machine.gpu_memory_bytes
    return [
        steps
        for steps in planned(policies, workload, machine)
        if steps.valid.fits_device(capacity) and fits_memory(steps, machine)
    ]


def _setup(steps: Steps, context: PasteContext, limit_s: float) -> SystemSetup:
    policy = Policy.of_plan(steps.plan)
    if policy.name in _DEEPSPEED:
        place = _FORKS.get(
            policy.name, "In the configuration of DeepSpeed, whose other keys stay"
        )
        lines = json.dumps(
            _DEEPSPEED[policy.name](steps.valid, policy, context), indent=2
        )
    else:
        place, template = _LINES[policy.name]
        lines = template.format(value=policy.value)
    return SystemSetup(
        policy=policy.text,
        iteration_ms=steps.iteration_s * 1e3,
        is_faster=steps.rating_s < limit_s,
        exact=steps.plan.is_exact,
        note=steps.plan.departures.consequence or None,
        place=place,
        lines=lines,
    )


def _superoffload(
    schedule: Schedule, policy: Policy, context: PasteContext
) -> dict[str, Any]:
    count, resident = schedule.plan.subgroups, len(schedule.plan.resident)
    # DeepSpeed keeps int((1 - ratio) count) subgroups on the GPU.
    ratio = round(1 - (resident + 0.5) / count, 4) if resident else 1.0
    config = deepspeed_config(schedule.workload, context.job, ratio)
    config["zero_optimization"]["offload_optimizer"] |= {
        "super_offload": True,
        "cpuadam_cores_perc": 0.8,
    }
    return config


def _zenflow(
    schedule: Schedule, policy: Policy, context: PasteContext
) -> dict[str, Any]:
    config = deepspeed_config(
        schedule.workload, context.job, 1.0, 1 if context.job.stage == 1 else 2
    )
    config["zero_optimization"]["zenflow"] = {
        "topk_ratio": float(policy.value or 0.0),
        "update_interval": int(policy.options["interval"]),
        "full_warm_up_rounds": 0,
        "overlap_step": True,
    }
    return config


def _deepcompile(
    schedule: Schedule, policy: Policy, context: PasteContext
) -> dict[str, Any]:
    config = deepspeed_config(schedule.workload, context.job, None)
    return {**config, "compile": {"deepcompile": True, "offload_opt_states": True}}


def zero_infinity_config(
    schedule: Schedule, policy: Policy, context: PasteContext
) -> dict[str, Any]:
    """Return the configuration of DeepSpeed for a schedule of `zero-infinity`."""
    path = next(path_of(op) for op in schedule.plan.ops if op.kind == "read")
    # A block as large as the smallest subgroup: larger than all gradients, unless one
    # is a subgroup of its own.
    whole_subgroup = MASTER_BYTES * min(schedule.workload.subgroups)
    block_bytes = (
        whole_subgroup if policy.options["gradients"] == "device" else _BLOCK_BYTES
    )
    offload = {
        "device": "nvme",
        "nvme_path": context.machine.storage[path].path or mark("nvme_path"),
        "pin_memory": True,
        "buffer_count": int(float(policy.value or BUFFERS_OF_SUBGROUP)),
        "pipeline_read": policy.options["pipeline_read"] == "true",
        "pipeline_write": policy.options["pipeline_write"] == "true",
    }
    return _storage_config(schedule, context, offload, block_bytes)


def _mlp_offload(
    schedule: Schedule, policy: Policy, context: PasteContext
) -> dict[str, Any]:
    """Return the configuration of MLP-Offload's DeepSpeed, with `dist_opt_ratio` as its
    authors ran it."""
    plan, storage = schedule.plan, context.machine.storage
    in_memory = plan.subgroups - len(plan.stored) + len(plan.storage_buffers)
    offload = {
        "device": "nvme",
        "nvme_path": ";".join(path.path or mark("nvme_path") for path in storage),
        "pin_memory": True,
        # Each path has so many.
        "buffer_count": ceil(BUFFERS_OF_SUBGROUP * in_memory / max(1, len(storage))),
        "pipeline_read": True,
        "pipeline_write": True,
        "dist_opt_enable_caching": 1,
        "dist_opt_grad_skip": 1,
        "dist_opt_ratio": 3,
        "dist_opt_one_at_time": 1,
    }
    return _storage_config(schedule, context, offload, _BLOCK_BYTES)


def _storage_config(
    schedule: Schedule, context: PasteContext, offload: dict[str, Any], block_bytes: int
) -> dict[str, Any]:
    config = deepspeed_config(schedule.workload, context.job, 1.0)
    config["zero_optimization"]["offload_optimizer"] = offload
    return {**config, "aio": {"block_size": block_bytes}}


_DEEPSPEED: dict[str, Callable[[Schedule, Policy, PasteContext], dict[str, Any]]] = {
    "superoffload": _superoffload,
    "zenflow": _zenflow,
    "deepcompile": _deepcompile,
    "zero-infinity": zero_infinity_config,
    "mlp-offload": _mlp_offload,
}
# Where the lines belong of systems that change DeepSpeed.
_FORKS = {
    "mlp-offload": (
        "In the configuration of MLP-Offload's DeepSpeed "
        "(github.com/mauryaavinash95/MLP-Offload)"
    )
}
# Where the lines belong, and the lines, by system; `{value}` is the value of the
# policy.
_LINES = {
    "megatron-hybrid": (
        "Among the flags of Megatron-LM",
        "--use-distributed-optimizer\n--use-precision-aware-optimizer\n--optimizer-cpu-offload\n"
        "--optimizer-offload-fraction {value}\n--overlap-cpu-optimizer-d2h-h2d",
    ),
    "prime-rl": (
        "In the configuration of prime-rl",
        "[trainer.model]\noptim_cpu_offload = false\nfull_offload = true",
    ),
    "torchao": (
        "In the script, instead of torch.optim.AdamW",
        "from torchao.optim import CPUOffloadOptimizer\n\n"
        "optimizer = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, "
        "offload_gradients=True, fused=True)",
    ),
    "fsdp2-offload": (
        "In the script, for each block and then the model",
        "from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard\n\n"
        "fully_shard(module, offload_policy=CPUOffloadPolicy())",
    ),
}
