"""What each mechanism is worth by itself, and what to do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ebbtide.errors import MachineError, PolicyError
from ebbtide.interleave.model.schedule import Schedule
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies import make_plan
from ebbtide.interleave.simulation.simulator import simulate
from ebbtide.machines.machine import Machine
from ebbtide.units import bytes_text

# A policy that gains less than this is not worth a change.
_LEAST_GAIN = 0.02


@dataclass(frozen=True)
class Step:
    """A mechanism added to those before it. gain_ms: of the iteration."""

    mechanism: str
    policy: str
    iteration_ms: float
    gain_ms: float


@dataclass(frozen=True)
class Advice:
    """policy: the best that fits. line: what to do, in one line. deepspeed: the section zero_optimization for the best
    that DeepSpeed itself can do; None where nothing of it fits. code: the line of Python that makes a DeepSpeed job
    follow the policy; None where nothing is to be offloaded."""

    policy: str
    line: str
    deepspeed: dict[str, object] | None
    code: str | None = None


def explain(workload: Workload, machine: Machine) -> list[Step]:
    """From ZeRO-Offload with blocking gradients to ours, a mechanism at a time. Steps that the machine's rates or the
    workload's facts do not suffice for are left out."""
    steps: list[Step] = []
    for mechanism, policy, job in _ladder(workload):
        try:
            took = simulate(make_plan(policy, job, machine), job, machine).iteration_s * 1e3
        except (MachineError, PolicyError):
            continue
        gain = steps[-1].iteration_ms - took if steps else 0.0
        steps.append(Step(mechanism, policy, took, gain))
    return steps


def _ladder(workload: Workload) -> Iterator[tuple[str, str, Workload]]:
    yield "ZeRO-Offload as it was, gradients blocking", "zero-offload,grads=blocking", workload
    yield "asynchronous gradients", "zero-offload", workload
    yield "pipelined conversions and copies", "pipelined", workload
    yield "interleaving, every second subgroup on the GPU", "interleaved:2", workload
    least = workload.least_free
    if least is None:
        return
    without = replace(workload, gpu_free=((0.0, least),))
    yield "shares and residents by the rates, in what is always free", "adaptive", without
    if len(workload.gpu_free or ()) > 1:
        yield "windows: state parked where memory is free for a while", "adaptive", workload


def recommend(workload: Workload, machine: Machine, stage: int | None = None) -> Advice:
    """The best policy that fits, and what of it DeepSpeed can do today. stage: of ZeRO, of a DeepSpeed job. Raises
    MachineError where rates are missing."""
    if workload.gpu_free is not None:
        everything = _try("gpu-only", workload, machine)
        if everything is not None and everything.fits_device(machine.gpu_memory_bytes):
            state = workload.state_bytes * workload.params / 1e9
            line = (
                f"do not offload: the optimizer's state ({state:.1f} GB a rank) fits beside the job all the time; "
                f"an iteration takes {everything.iteration_s * 1e3:,.0f} ms then"
            )
            return Advice("gpu-only", line, None)
    ours = "adaptive" if workload.gpu_free is not None else "interleaved:2"
    best = simulate(make_plan(ours, workload, machine), workload, machine)
    static, ratio = _best_static(workload, machine)
    took = f"{best.iteration_s * 1e3:,.0f} ms an iteration"
    line = f"{ours}: {took}" + (f" ({best.plan.remark})" if best.plan.remark else "")
    if static is not None and static.iteration_s < (1 + _LEAST_GAIN) * best.iteration_s:
        line = f"nothing to gain by another policy; {line}"
    host = best.host_bytes()
    if machine.host_memory_bytes is not None and host > machine.host_memory_bytes:
        there = bytes_text(machine.host_memory_bytes)
        line += f"; it does not fit: it takes {bytes_text(host)} of host memory, and a rank has {there}"
    section: dict[str, object] | None = None
    if static is not None:
        section = {
            "offload_optimizer": {"device": "cpu", "pin_memory": True, "ratio": ratio},
            "sub_group_size": workload.subgroup_params,
        }
        line += f"; in plain DeepSpeed {json.dumps(section)}: {static.iteration_s * 1e3:,.0f} ms"
    code = f'ebbtide.interleave.deepspeed.enable(policy="{ours}")'
    needs = f", which needs zero_optimization.stage 3: this job has stage {stage}" if stage in (1, 2) else ""
    line += f"; {ours} in a DeepSpeed job: {code}{needs}"
    smaller = _without_offload(workload)
    return Advice(ours, line + (f"; {smaller}" if smaller else ""), section, code)


def _try(policy: str, workload: Workload, machine: Machine) -> Schedule | None:
    try:
        return simulate(make_plan(policy, workload, machine), workload, machine)
    except MachineError:
        return None


def _best_static(workload: Workload, machine: Machine) -> tuple[Schedule | None, float]:
    """The quickest static split that fits, and its ratio; of ratios that DeepSpeed rounds to the same subgroups the
    largest."""
    best, chosen = None, 1.0
    for ratio in (share / 20 for share in range(20, -1, -1)):
        schedule = (
            _try(f"twin-flow:{ratio}", workload, machine) if ratio < 1 else _try("zero-offload", workload, machine)
        )
        # Where it is not known what is free, nothing can be said to fit but what takes nothing.
        fits = schedule is not None and schedule.fits_device(machine.gpu_memory_bytes)
        if schedule is not None and fits and (best is None or schedule.iteration_s < best.iteration_s):
            best, chosen = schedule, ratio
    return best, chosen


def _without_offload(workload: Workload) -> str | None:
    """Whether state of fewer bytes would fit beside the job, so that nothing need be offloaded."""
    free = workload.least_free
    if free is None:
        return None
    for name, size in (("bf16 moments (8 B a parameter)", 8.0), ("8-bit moments (6 B a parameter)", 6.0)):
        if (size + workload.grad_bytes) * workload.params <= free:
            need = size * workload.params / 1e9
            return f"with {name}, {need:.1f} GB, nothing would have to be offloaded (other arithmetic, other results)"
    return None
