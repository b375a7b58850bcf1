"""Durations of the operations of a plan if nothing else runs.

Also the host memory that they read and write.
"""

from ebbtide.interleave.model.kinds import CAST_READ_BYTES, find_kind
from ebbtide.interleave.model.plan import BACKWARD, FORWARD, UPDATE, Op, Plan
from ebbtide.interleave.model.workload import Workload
from ebbtide.machines.machine import Machine

# Collectives that need more than a phase has leave this much of the link: their bytes
# or the rates are not exact.
_LEAST_LINK_SHARE = 0.05
# Phases before the update, by the number of the point at which they begin.
_PHASES = ("other", "forward", "backward")


def host_traffic(op: Op, workload: Workload) -> float:
    """Return the bytes of host memory that an operation reads and writes.

    An update on the CPU takes gradient, state and parameter; a copy its bytes once;
    clipping all gradients if their norm is computed on the host.
    """
    return 0.0 if op.resource == "gpu" else find_kind(op.kind).host_bytes(op, workload)


def norm_s(workload: Workload, machine: Machine) -> float:
    """Return the seconds that clipping waits for the norm of all gradients.

    On the host, it is a pass at `cpu_norm_params_per_s`, else at the bandwidth of host
    memory; on the GPU, it is as much shorter than an update as it moves fewer bytes.
    """
    if not workload.clipping or workload.norm is None:
        return 0.0
    rate = (
        "gpu_update_params_per_s"
        if workload.norm == "device"
        else "host_memory_bytes_per_s"
    )
    machine.need([rate], "the gradient norm")
    if workload.norm == "device":
        share = workload.grad_bytes / workload.cpu_update_bytes
        return workload.params * share / (machine.gpu_update_params_per_s or 1.0)
    if machine.cpu_norm_params_per_s is not None:
        return workload.params / machine.cpu_norm_params_per_s
    return (
        workload.params * workload.grad_bytes / (machine.host_memory_bytes_per_s or 1.0)
    )


def link_rates(workload: Workload, machine: Machine) -> dict[str, float]:
    """Return the link's bytes/s of each direction that the job's own copies leave; 0
    where it is not known."""
    return {
        "h2d": (machine.h2d_bytes_per_s or 0.0) * (1 - workload.h2d_busy_share),
        "d2h": (machine.d2h_bytes_per_s or 0.0) * (1 - workload.d2h_busy_share),
    }


def alone_cpu_rate(workload: Workload, machine: Machine) -> float:
    """Return how many parameters/s the CPU updates if nothing else runs.

    Host memory must have the bandwidth for them.
    """
    memory_limited = (
        machine.host_memory_bytes_per_s or 0.0
    ) / workload.cpu_update_bytes
    return min(machine.cpu_update_rate(workload.master) or 0.0, memory_limited)


def link_shares(workload: Workload, machine: Machine) -> dict[str, tuple[float, float]]:
    """Return the shares of the link to the device and to the host that the job's
    collectives leave, by phase.

    They take the time that their bytes need at the rate that `h2d_busy_share` and
    `d2h_busy_share` leave.
    """
    lengths = dict(
        zip(
            _PHASES,
            (workload.other_s, workload.forward_s, workload.backward_s),
            strict=True,
        )
    )
    rates = link_rates(workload, machine)

    def share(nbytes: float, direction: str, length_s: float) -> float:
        possible = rates[direction] * length_s
        return max(_LEAST_LINK_SHARE, 1 - nbytes / possible) if possible else 1.0

    return {
        phase: (share(h2d, "h2d", lengths[phase]), share(d2h, "d2h", lengths[phase]))
        for phase, h2d, d2h in workload.collective_bytes
    }


def phase_before(point: float) -> str:
    """Return the phase of the compute that ends at a point of the iteration.

    See `plan.UPDATE`.
    """
    if not 0.0 < point <= UPDATE:
        raise ValueError(f"no compute ends at point {point}")
    return _PHASES[0 if point <= FORWARD else 1 if point <= BACKWARD else 2]


class Durations:
    """Durations of a plan's operations if nothing else runs, and the rates behind them.

    A cast on the GPU of unknown rate is as much shorter than an update as it moves
    fewer bytes. Raises MachineError if the machine lacks a rate that the plan needs."""

    def __init__(self, plan: Plan, workload: Workload, machine: Machine) -> None:
        samples = {(op.kind, op.resource, op.pageable): op for op in plan.ops}.values()
        needed = {"host_memory_bytes_per_s"}
        needed.update(rate for op in samples for rate in find_kind(op.kind).rates(op))
        gpu_cast = machine.gpu_cast_params_per_s
        if "gpu_cast_params_per_s" in needed and gpu_cast is None:
            needed = needed - {"gpu_cast_params_per_s"} | {"gpu_update_params_per_s"}
            moved_share = (
                CAST_READ_BYTES + workload.param_bytes
            ) / workload.cpu_update_bytes
            gpu_cast = (machine.gpu_update_params_per_s or 1.0) / moved_share
        machine.need(sorted(needed), f"policy {plan.policy}")
        for name in dict.fromkeys(op.kind for op in samples):
            check = find_kind(name).check
            if check is not None:
                check([op for op in plan.ops if op.kind == name], machine, plan.policy)
        self.machine = machine
        pinned = link_rates(workload, machine)
        # A job that uses the link leaves less of the link to pageable copies too.
        limited = {
            "h2d": min(machine.h2d_pageable_bytes_per_s or 1.0, pinned["h2d"]),
            "d2h": min(machine.d2h_pageable_bytes_per_s or 1.0, pinned["d2h"]),
        }
        self.copy_rates = {False: pinned, True: limited}
        own = workload.own_update_s
        self.update_rates = {
            "cpu": (machine.cpu_update_rate(workload.master) or 1.0) * plan.cpu_share,
            "gpu": workload.params / own
            if own
            else machine.gpu_update_params_per_s or 1.0,
        }
        self.speculative_share = 1.0 if plan.rolls_back else machine.out_of_place_share
        self.cast_rates = {
            "cpu": machine.cpu_cast_params_per_s or 1.0,
            "gpu": gpu_cast or 1.0,
        }
        self.norm_s: float = norm_s(workload, machine)
        self.operation_s = 0.0 if own else machine.operation_s or 0.0

    def seconds(self, op: Op) -> float:
        return find_kind(op.kind).seconds(op, self)
