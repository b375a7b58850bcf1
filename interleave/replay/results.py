"""The results of a replay: the plan of each policy, simulated, and the bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ebbtide.errors import MachineError, PolicyError
from ebbtide.interleave.model.schedule import Schedule
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies import BUILT_IN, make_plan
from ebbtide.interleave.simulation.bound import Bound, bound
from ebbtide.interleave.simulation.simulator import simulate
from ebbtide.machines.accuracy import accuracy_of
from ebbtide.machines.machine import Machine

# Above these shares a resource counts as what limits the update.
_LIMITING_MEMORY_SHARE = 0.95
_LIMITING_BUSY_SHARE = 0.75


@dataclass(frozen=True)
class PolicyResult:
    """The iteration of one policy. Bytes are per iteration and rank.

    Attributes:
        policy: The policy's string.
        iteration_ms: Iteration time.
        forward_ms: Its forward.
        backward_ms: Its backward.
        update_ms: Its update.
        other_ms: The part of it outside of these phases.
        exposed_ms: Time that the optimizer adds to the iteration.
        h2d_bytes: Bytes copied to the device.
        d2h_bytes: Bytes copied to the host.
        busy: Busy share of each resource during the update.
        peak_device_bytes: Largest device memory of the plan.
        host_bytes: Host memory of the plan.
        fits: Whether both memories suffice; None if it is not known.
        limited_by: What limits the update: a resource, "host memory" (its bandwidth), "dependencies" or "nothing".
    """

    policy: str
    iteration_ms: float
    forward_ms: float
    backward_ms: float
    update_ms: float
    other_ms: float
    exposed_ms: float
    h2d_bytes: float
    d2h_bytes: float
    busy: dict[str, float]
    peak_device_bytes: float
    host_bytes: float
    fits: bool | None
    limited_by: str


@dataclass(frozen=True)
class Replay:
    """The results of all policies, in the order requested.

    Attributes:
        workload: The workload.
        machine: The machine.
        results: A result per policy.
        schedules: The schedule of each result.
        bound: Lower bounds of any policy.
        skipped: Built-in policies that were left out, and why.
    """

    workload: Workload
    machine: Machine
    results: list[PolicyResult]
    schedules: list[Schedule]
    bound: Bound
    skipped: dict[str, str]

    def as_json(self) -> dict[str, Any]:
        """Return the object that `ebbtide replay --json` prints."""
        return {
            "workload": workload_json(self.workload),
            "machine": self.machine.as_json(),
            "results": [asdict(result) for result in self.results],
            "bound": {
                "update_ms": self.bound.update_s * 1e3,
                "iteration_ms": self.bound.iteration_s * 1e3,
                "exposed_ms": self.bound.exposed_s * 1e3,
                "exposed_whole_subgroups_ms": self.bound.exposed_whole_s * 1e3,
            },
            "skipped": self.skipped,
            "accuracy": accuracy_of(self.machine).as_json(),
        }


def replay(workload: Workload, machine: Machine, policies: Sequence[str] | None = None) -> Replay:
    """Simulate a workload on a machine under some policies.

    Args:
        workload: The workload.
        machine: The machine.
        policies: Policies' strings; None for all built-in policies that the machine's rates suffice for.

    Raises:
        PolicyError: A policy does not exist or cannot plan this workload.
        MachineError: The machine lacks a rate that is needed.
    """
    results, schedules = [], []
    skipped = {}
    for text in policies or BUILT_IN:
        try:
            schedule = simulate(make_plan(text, workload, machine), workload, machine)
        except (MachineError, PolicyError) as error:
            if policies:
                raise
            skipped[text] = str(error)
            continue
        schedules.append(schedule)
        results.append(_result(text, schedule, machine))
    if not results and skipped:
        raise MachineError(next(iter(skipped.values())))
    return Replay(workload, machine, results, schedules, bound(workload, machine), skipped)


def workload_json(workload: Workload) -> dict[str, Any]:
    """Return the object of a workload file."""
    values = asdict(workload)
    free_steps = values.pop("gpu_free")
    values["gpu_free_bytes"] = (
        None
        if free_steps is None
        else [{"at_s": time, "bytes": size + workload.gpu_slack_bytes} for time, size in free_steps]
    )
    values["collective_bytes"] = {phase: {"h2d": h2d, "d2h": d2h} for phase, h2d, d2h in workload.collective_bytes}
    values["gradients_stay"] = values.pop("gradients_held_until_step")
    return values


def _result(text: str, schedule: Schedule, machine: Machine) -> PolicyResult:
    host = schedule.host_bytes()
    fits = schedule.fits_device(machine.gpu_memory_bytes)
    if machine.host_memory_bytes is None:
        fits = None if fits else fits
    elif host > machine.host_memory_bytes:
        fits = False
    if machine.pinned_memory_bytes is not None and schedule.pinned_bytes() > machine.pinned_memory_bytes:
        fits = False
    return PolicyResult(
        policy=text,
        iteration_ms=schedule.iteration_s * 1e3,
        forward_ms=schedule.forward_s * 1e3,
        backward_ms=schedule.backward_s * 1e3,
        update_ms=schedule.update_s * 1e3,
        other_ms=schedule.other_s * 1e3,
        exposed_ms=schedule.exposed_s * 1e3,
        h2d_bytes=schedule.moved_bytes("h2d"),
        d2h_bytes=schedule.moved_bytes("d2h"),
        busy=schedule.busy_shares(),
        peak_device_bytes=schedule.peak_device_bytes,
        host_bytes=host,
        fits=fits,
        limited_by=limiting_resource(schedule, machine),
    )


def limiting_resource(schedule: Schedule, machine: Machine) -> str:
    """Return what limits the update: host memory bandwidth, else the busiest resource, else dependencies."""
    if schedule.update_s <= 0:
        return "nothing"
    shares = schedule.busy_shares()
    busiest = max(shares, key=lambda name: shares[name])
    traffic = schedule.host_traffic_in_update()
    memory_share = traffic / schedule.update_s / (machine.host_memory_bytes_per_s or float("inf"))
    if memory_share > _LIMITING_MEMORY_SHARE:
        return "host memory"
    return busiest if shares[busiest] > _LIMITING_BUSY_SHARE else "dependencies"
