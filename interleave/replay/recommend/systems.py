"""Other systems in a recommendation: those that beat the recommended policy, and Megatron-LM's best fraction."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ebbtide.errors import MachineError, PolicyError
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies import make_plan, parse
from ebbtide.interleave.replay.recommend.choice import fits_memory
from ebbtide.interleave.replay.recommend.configuration import deepspeed_config
from ebbtide.interleave.replay.recommend.recorded_job import RecordedJob
from ebbtide.interleave.replay.recommend.storage_configs import mlp_offload_config, zero_infinity_config
from ebbtide.interleave.simulation.steps import Steps, simulate_steps
from ebbtide.machines.machine import Machine

# A smaller gain is not worth another system.
_MIN_GAIN = 0.02
# As they run today. Of Megatron-LM the best fraction is searched.
_SYSTEMS = (
    "superoffload,rule=deepspeed",
    "zenflow:0.1,rule=deepspeed",
    "deepcompile",
    "prime-rl",
    "torchao",
    "fsdp2-offload",
    "zero-infinity:12,pipeline_read=true,pipeline_write=true",
    "zero-infinity:12,pipeline_read=true,pipeline_write=true,gradients=device",
    "mlp-offload",
)
# Of fractions with the same subgroups the first one is taken.
_FRACTIONS = tuple(step / 20 for step in range(20, 0, -1))


@dataclass(frozen=True)
class SystemSetup:
    """Another system, and the lines that make a job use it.

    Attributes:
        policy: The policy's string.
        iteration_ms: Its predicted iteration time.
        is_faster: Whether it is faster than the recommended policy, or fits where that does not.
        exact: Whether each step gives the results that the workload asks for.
        note: How the results differ where they are not exact; None where they are.
        place: Where the lines belong.
        lines: The lines.
    """

    policy: str
    iteration_ms: float
    is_faster: bool
    exact: bool
    note: str | None
    place: str
    lines: str


def other_systems(workload: Workload, machine: Machine, job: RecordedJob, best_s: float) -> tuple[SystemSetup, ...]:
    """Return the systems that fit and are faster than the recommended policy, and the best fraction of Megatron-LM.

    Args:
        workload: The workload.
        machine: The machine.
        job: Settings of the job that the lines repeat.
        best_s: Iteration time of the recommended policy.

    Returns:
        Exact ones first, each kind fastest first.
    """
    limit_s = (1 - _MIN_GAIN) * best_s
    fitting = [steps for text in _SYSTEMS if (steps := _steps(text, workload, machine)) is not None]
    faster = [steps for steps in fitting if steps.mean("iteration_s") < limit_s]
    fractions = [f"megatron-hybrid:{fraction:g},overlap=copies" for fraction in _FRACTIONS]
    hybrids = [steps for text in fractions if (steps := _steps(text, workload, machine)) is not None]
    if hybrids:
        faster.append(min(hybrids, key=lambda steps: steps.mean("iteration_s")))
    setups = [_setup(steps, workload, job, machine, limit_s) for steps in faster]
    return tuple(sorted(setups, key=lambda setup: (not setup.exact, setup.iteration_ms)))


def _steps(policy: str, workload: Workload, machine: Machine) -> Steps | None:
    """Return the simulated steps of a policy; None if it cannot plan the workload, or is not known to fit."""
    try:
        steps = simulate_steps(make_plan(policy, workload, machine), workload, machine)
    except (MachineError, PolicyError):
        return None
    fits = steps.valid.fits_device(machine.gpu_memory_bytes) and fits_memory(steps.valid, machine)
    return steps if fits else None


def _setup(steps: Steps, workload: Workload, job: RecordedJob, machine: Machine, limit_s: float) -> SystemSetup:
    plan, iteration_s = steps.valid.plan, steps.mean("iteration_s")
    spec = parse(plan.policy)
    if spec.name in _DEEPSPEED:
        place = _FORKS.get(spec.name, "In the configuration of DeepSpeed, whose other keys stay")
        lines = json.dumps(_DEEPSPEED[spec.name](steps, workload, job, machine), indent=2)
    else:
        place, template = _LINES[spec.name]
        lines = template.format(value=spec.value)
    return SystemSetup(
        policy=spec.text,
        iteration_ms=iteration_s * 1e3,
        is_faster=iteration_s < limit_s,
        exact=plan.is_exact,
        note=plan.departures.consequence or None,
        place=place,
        lines=lines,
    )


def _superoffload(steps: Steps, workload: Workload, job: RecordedJob, machine: Machine) -> dict[str, Any]:
    count, resident = steps.valid.plan.subgroups, len(steps.valid.plan.resident)
    # DeepSpeed keeps int((1 - ratio) count) subgroups on the GPU.
    ratio = round(1 - (resident + 0.5) / count, 4) if resident else 1.0
    config = deepspeed_config(workload, job, ratio)
    config["zero_optimization"]["offload_optimizer"] |= {"super_offload": True, "cpuadam_cores_perc": 0.8}
    return config


def _zenflow(steps: Steps, workload: Workload, job: RecordedJob, machine: Machine) -> dict[str, Any]:
    spec = parse(steps.valid.plan.policy)
    config = deepspeed_config(workload, job, 1.0, 1 if job.stage == 1 else 2)
    config["zero_optimization"]["zenflow"] = {
        "topk_ratio": float(spec.value or 0.0),
        "update_interval": int(spec.options["interval"]),
        "full_warm_up_rounds": 0,
        "overlap_step": True,
    }
    return config


def _deepcompile(steps: Steps, workload: Workload, job: RecordedJob, machine: Machine) -> dict[str, Any]:
    return {**deepspeed_config(workload, job, None), "compile": {"deepcompile": True, "offload_opt_states": True}}


_DEEPSPEED: dict[str, Callable[[Steps, Workload, RecordedJob, Machine], dict[str, Any]]] = {
    "superoffload": _superoffload,
    "zenflow": _zenflow,
    "deepcompile": _deepcompile,
    "zero-infinity": zero_infinity_config,
    "mlp-offload": mlp_offload_config,
}
# Where the lines belong of systems that change DeepSpeed.
_FORKS = {
    "mlp-offload": "In the configuration of MLP-Offload's DeepSpeed (github.com/mauryaavinash95/MLP-Offload)",
}
# Where the lines belong, and the lines, by system; `{value}` is the value of the policy.
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
        "optimizer = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, offload_gradients=True, fused=True)",
    ),
    "fsdp2-offload": (
        "In the script, for each block and then the model",
        "from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard\n\n"
        "fully_shard(module, offload_policy=CPUOffloadPolicy())",
    ),
}
