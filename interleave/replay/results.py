"""The results of a replay: the plan of each policy, simulated, and the bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ebbtide.errors import MachineError, PolicyError
from ebbtide.interleave.model.host_memory import available_host_bytes
from ebbtide.interleave.model.overlap import BOTH, NO_OVERLAP, OVERLAPS, Overlap
from ebbtide.interleave.model.plan import STORAGE_RESOURCES
from ebbtide.interleave.model.schedule import Schedule
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies import BUILT_IN, make_plan, parse, with_systems
from ebbtide.interleave.replay.recommend.choice import memory_excess
from ebbtide.interleave.simulation.bound import Bound, bound
from ebbtide.interleave.simulation.steps import Steps, simulate_steps
from ebbtide.machines.accuracy import accuracy_of
from ebbtide.machines.machine import Machine

# Above these shares a resource counts as what limits the update.
_LIMITING_MEMORY_SHARE = 0.95
_LIMITING_BUSY_SHARE = 0.75
_DAY_S = 86400.0


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
        speculated_subgroups: Subgroups that are updated before it is known whether clipping changes them.
        redone_iteration_ms: Iteration time of a step that clipping changes; None if nothing is speculated. Times above
            are the mean over all steps, other figures those of a step that it does not change.
        limited_by: What limits the update: a resource, "host memory" (its bandwidth), "storage", "dependencies" or
            "nothing".
        storage_read_bytes: Bytes read from storage.
        storage_written_bytes: Bytes written to storage.
        storage_written_bytes_per_day: The same, if iterations follow each other for a day.
        storage_busy: By path: the shares of the iteration during which it reads and writes.
        stored_subgroups: Subgroups whose state is in storage.
        exact: Whether each step gives the results that the workload asks for: the same update, of all gradients,
            clipped if the workload clips.
        note: How the results differ where they are not exact; None where they are.
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
    speculated_subgroups: int
    redone_iteration_ms: float | None
    storage_read_bytes: float
    storage_written_bytes: float
    storage_written_bytes_per_day: float
    storage_busy: list[dict[str, float]]
    stored_subgroups: int
    exact: bool
    note: str | None


@dataclass(frozen=True)
class Replay:
    """The results of all policies, in the order requested.

    Attributes:
        workload: The workload.
        machine: The machine.
        results: A result per policy.
        schedules: The schedule of each result.
        bound: Lower bounds of any exact policy without overlap.
        overlap: The overlap of all exact policies together.
        overlap_bound: Lower bounds of any policy with that overlap or a part of it.
        skipped: Built-in policies that were left out, and why.
    """

    workload: Workload
    machine: Machine
    results: list[PolicyResult]
    schedules: list[Schedule]
    bound: Bound
    overlap: Overlap
    overlap_bound: Bound
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
                "overlap": self.overlap.name,
                "overlap_iteration_ms": self.overlap_bound.iteration_s * 1e3,
                "overlap_exposed_ms": self.overlap_bound.exposed_s * 1e3,
                "overlap_exposed_whole_subgroups_ms": self.overlap_bound.exposed_whole_s * 1e3,
            },
            "skipped": self.skipped,
            "accuracy": accuracy_of(self.machine).as_json(),
        }


def replay(workload: Workload, machine: Machine, policies: Sequence[str] | None = None) -> Replay:
    """Simulate a workload on a machine under some policies.

    Args:
        workload: The workload.
        machine: The machine.
        policies: Policies' strings; `systems` for those of all other systems that can plan the workload. None for all
            built-in policies that the machine's rates suffice for.

    Raises:
        PolicyError: A policy does not exist or cannot plan this workload.
        MachineError: The machine lacks a rate that is needed.
    """
    results, schedules = [], []
    skipped = {}
    for text in with_systems(policies or BUILT_IN):
        try:
            steps = simulate_steps(make_plan(text, workload, machine), workload, machine)
        except (MachineError, PolicyError) as error:
            if policies and text in policies:
                raise
            skipped[text] = str(error)
            continue
        schedules.append(steps.valid)
        results.append(_result(text, steps, machine))
    if not results and skipped:
        raise MachineError(next(iter(skipped.values())))
    without_overlap, overlap = bound(workload, machine), _overlap_of_all(results, schedules)
    overlap_bound = without_overlap if overlap == NO_OVERLAP else bound(workload, machine, overlap)
    return Replay(workload, machine, results, schedules, without_overlap, overlap, overlap_bound, skipped)


def _overlap_of_all(results: list[PolicyResult], schedules: list[Schedule]) -> Overlap:
    """Return the overlap that any policy asks for in its string, or its plan has if it is exact."""
    names = [parse(result.policy).options.get("overlap", "none") for result in results]
    asked = [BOTH if name == "auto" else OVERLAPS.get(name, NO_OVERLAP) for name in names]
    plans = [schedule.plan for schedule in schedules if schedule.plan.is_exact]
    return Overlap(
        forward=any(overlap.forward for overlap in asked) or any(plan.has_late_updates for plan in plans),
        backward=any(overlap.backward for overlap in asked) or any(plan.speculated for plan in plans),
    )


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


def _result(text: str, steps: Steps, machine: Machine) -> PolicyResult:
    schedule = steps.valid
    host = schedule.host_bytes()
    fits = schedule.fits_device(machine.gpu_memory_bytes)
    if memory_excess(schedule, machine) is not None:
        fits = False
    elif available_host_bytes(schedule.workload, machine) is None:
        fits = None
    iteration_s, written = steps.mean("iteration_s"), schedule.moved_bytes("storage_write")
    return PolicyResult(
        policy=text,
        iteration_ms=iteration_s * 1e3,
        forward_ms=steps.mean("forward_s") * 1e3,
        backward_ms=steps.mean("backward_s") * 1e3,
        update_ms=steps.mean("update_s") * 1e3,
        other_ms=steps.mean("other_s") * 1e3,
        exposed_ms=steps.mean("exposed_s") * 1e3,
        h2d_bytes=schedule.moved_bytes("h2d"),
        d2h_bytes=schedule.moved_bytes("d2h"),
        busy=schedule.busy_shares(),
        peak_device_bytes=schedule.peak_device_bytes,
        host_bytes=host,
        fits=fits,
        limited_by=limiting_resource(schedule, machine),
        speculated_subgroups=len(schedule.plan.speculated),
        redone_iteration_ms=None if steps.redone is None else steps.redone.iteration_s * 1e3,
        storage_read_bytes=schedule.moved_bytes("storage_read"),
        storage_written_bytes=written,
        storage_written_bytes_per_day=written / iteration_s * _DAY_S if written else 0.0,
        storage_busy=schedule.storage_busy_shares(),
        stored_subgroups=len(schedule.plan.stored),
        exact=schedule.plan.is_exact,
        note=schedule.plan.departures.consequence or None,
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
    if shares[busiest] <= _LIMITING_BUSY_SHARE:
        return "dependencies"
    return "storage" if busiest in STORAGE_RESOURCES else busiest
