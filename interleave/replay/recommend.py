"""The recommended setup: the policy, and what DeepSpeed itself can do of it."""

from __future__ import annotations

import json
from dataclasses import dataclass

from ebbtide.errors import MachineError
from ebbtide.interleave.model.schedule import Schedule
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies import make_plan
from ebbtide.interleave.simulation.simulator import simulate
from ebbtide.machines.machine import Machine
from ebbtide.units import bytes_text

# A smaller gain is not worth a change of policy.
_MIN_GAIN = 0.02


@dataclass(frozen=True)
class Recommendation:
    """The recommended setup.

    Attributes:
        policy: The best policy that fits.
        line: The recommendation in one line.
        deepspeed: The section zero_optimization for the best that DeepSpeed itself can do; None if none of it fits.
        code: A line of Python that makes a DeepSpeed job use the policy; None if nothing should be offloaded.
    """

    policy: str
    line: str
    deepspeed: dict[str, object] | None
    code: str | None = None


def recommend(workload: Workload, machine: Machine, stage: int | None = None) -> Recommendation:
    """Recommend the best policy that fits, and what DeepSpeed can do of it today.

    Args:
        workload: The workload.
        machine: The machine.
        stage: Stage of ZeRO of a DeepSpeed job.

    Raises:
        MachineError: The machine lacks a rate that the best policy needs.
    """
    if workload.gpu_free is not None:
        on_gpu = _simulated("gpu-only", workload, machine)
        if on_gpu is not None and on_gpu.fits_device(machine.gpu_memory_bytes):
            state_gb = workload.state_bytes * workload.params / 1e9
            line = (
                f"do not offload: the optimizer's state ({state_gb:.1f} GB a rank) fits on the device all the time; "
                f"an iteration takes {on_gpu.iteration_s * 1e3:,.0f} ms then"
            )
            return Recommendation("gpu-only", line, None)
    policy = "adaptive" if workload.gpu_free is not None else "interleaved:2"
    best = simulate(make_plan(policy, workload, machine), workload, machine)
    static, ratio = _best_static_split(workload, machine)
    line = f"{policy}: {best.iteration_s * 1e3:,.0f} ms an iteration"
    if best.plan.remark:
        line += f" ({best.plan.remark})"
    if static is not None and static.iteration_s < (1 + _MIN_GAIN) * best.iteration_s:
        line = f"nothing to gain by another policy; {line}"
    host = best.host_bytes()
    if machine.host_memory_bytes is not None and host > machine.host_memory_bytes:
        available = bytes_text(machine.host_memory_bytes)
        line += f"; it does not fit: it needs {bytes_text(host)} of host memory, and a rank has {available}"
    section: dict[str, object] | None = None
    if static is not None:
        section = {
            "offload_optimizer": {"device": "cpu", "pin_memory": True, "ratio": ratio},
            "sub_group_size": workload.subgroup_params,
        }
        line += f"; in plain DeepSpeed {json.dumps(section)}: {static.iteration_s * 1e3:,.0f} ms"
    code = f'ebbtide.interleave.deepspeed.enable(policy="{policy}")'
    needs = f", which needs zero_optimization.stage 3: this job has stage {stage}" if stage in (1, 2) else ""
    line += f"; {policy} in a DeepSpeed job: {code}{needs}"
    smaller_state = _without_offload(workload)
    return Recommendation(policy, line + (f"; {smaller_state}" if smaller_state else ""), section, code)


def _simulated(policy: str, workload: Workload, machine: Machine) -> Schedule | None:
    """Return a policy's schedule, None if the machine lacks a rate."""
    try:
        return simulate(make_plan(policy, workload, machine), workload, machine)
    except MachineError:
        return None


def _best_static_split(workload: Workload, machine: Machine) -> tuple[Schedule | None, float]:
    """Return the fastest static split that fits, and its ratio.

    Of ratios that DeepSpeed rounds to the same subgroups it is the largest.
    """
    best, best_ratio = None, 1.0
    for ratio in (share / 20 for share in range(20, -1, -1)):
        policy = f"twin-flow:{ratio}" if ratio < 1 else "zero-offload"
        schedule = _simulated(policy, workload, machine)
        # If the free memory is not known, only a plan that needs no device memory is sure to fit.
        fits = schedule is not None and schedule.fits_device(machine.gpu_memory_bytes)
        if schedule is not None and fits and (best is None or schedule.iteration_s < best.iteration_s):
            best, best_ratio = schedule, ratio
    return best, best_ratio


def _without_offload(workload: Workload) -> str | None:
    """Return an optimizer with fewer bytes of state that would need no offload, in words; None if none fits."""
    free = workload.min_free_bytes
    if free is None:
        return None
    for name, state_bytes in (("bf16 moments (8 B a parameter)", 8.0), ("8-bit moments (6 B a parameter)", 6.0)):
        if (state_bytes + workload.grad_bytes) * workload.params <= free:
            needed_gb = state_bytes * workload.params / 1e9
            return (
                f"with {name}, {needed_gb:.1f} GB, nothing would have to be offloaded (other arithmetic, other results)"
            )
    return None
