"""What each policy would give: plans made, simulated, and held against the bound."""

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
from ebbtide.machines.machine import Machine


@dataclass(frozen=True)
class Result:
    """One policy's iteration. Times in ms; bytes per iteration and rank; busy: shares of the update phase. fits: None
    where device or host memory are not known."""

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
    """All results, in the order asked for. skipped: policies that this machine's rates do not suffice for, and why."""

    workload: Workload
    machine: Machine
    results: list[Result]
    schedules: list[Schedule]
    bound: Bound
    skipped: dict[str, str]

    def as_json(self) -> dict[str, Any]:
        """The object that `ebbtide replay --json` prints."""
        found = self.bound
        return {
            "workload": workload_json(self.workload),
            "machine": self.machine.as_json(),
            "results": [asdict(result) for result in self.results],
            "bound": {
                "update_ms": found.update_s * 1e3,
                "iteration_ms": found.iteration_s * 1e3,
                "exposed_ms": found.exposed_s * 1e3,
                "exposed_whole_subgroups_ms": found.exposed_whole_s * 1e3,
            },
            "skipped": self.skipped,
        }


def replay(workload: Workload, machine: Machine, policies: Sequence[str] | None = None) -> Replay:
    """Replay a workload on a machine under some policies, or all built-in ones (those that the machine's rates suffice
    for). Raises PolicyError for a policy that does not exist, MachineError for a rate that is needed and not known."""
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
    """The object of a workload file."""
    values = asdict(workload)
    line = values.pop("gpu_free")
    values["gpu_free_bytes"] = None if line is None else [{"at_s": at, "bytes": size} for at, size in line]
    return values


def _result(text: str, schedule: Schedule, machine: Machine) -> Result:
    host = schedule.host_bytes()
    fits = schedule.fits_device(machine.gpu_memory_bytes)
    if machine.host_memory_bytes is None:
        fits = None if fits else fits
    elif host > machine.host_memory_bytes:
        fits = False
    return Result(
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
        limited_by=_limit(schedule, machine),
    )


def _limit(schedule: Schedule, machine: Machine) -> str:
    """What the update waits for most: the busiest resource, or the memory that they share."""
    if schedule.update_s <= 0:
        return "nothing"
    shares = schedule.busy_shares()
    busiest = max(shares, key=lambda name: shares[name])
    traffic = schedule.host_traffic_in_update()
    of_memory = traffic / schedule.update_s / (machine.host_memory_bytes_per_s or float("inf"))
    if of_memory > 0.95:
        return "host memory"
    return busiest if shares[busiest] > 0.75 else "dependencies"
