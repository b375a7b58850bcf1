"""The mean iteration over steps whose speculative updates are valid and steps in which they are computed again."""

from __future__ import annotations

from dataclasses import dataclass

from ebbtide.interleave.model.host_memory import available_host_bytes
from ebbtide.interleave.model.plan import Plan
from ebbtide.interleave.model.schedule import Schedule
from ebbtide.interleave.model.speculation import redone
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.simulation.simulator import simulate
from ebbtide.machines.machine import Machine


@dataclass(frozen=True)
class Steps:
    """Schedules of the two kinds of steps.

    Attributes:
        valid: The schedule of a step that clipping does not change.
        redone: The schedule of one that it changes; None if the plan does not speculate.
    """

    valid: Schedule
    redone: Schedule | None

    def cost(self, machine: Machine) -> tuple[bool, bool, float]:
        """Return whether the plan exceeds the memory of the device, and of the host, and its mean iteration, s."""
        available = available_host_bytes(self.valid.workload, machine)
        exceeds_host = available is not None and self.valid.host_bytes() > available
        return self.valid.fits_device(None) is False, exceeds_host, self.mean("iteration_s")

    def mean(self, key: str) -> float:
        """Return the mean of an attribute of the schedules, by `Workload.clip_active_share`."""
        value: float = getattr(self.valid, key)
        if self.redone is None:
            return value
        share = self.valid.workload.clip_active_share
        return (1 - share) * value + share * float(getattr(self.redone, key))


def simulate_steps(plan: Plan, workload: Workload, machine: Machine) -> Steps:
    """Run a plan on a machine, in a step that clipping does not change and in one that it changes.

    Raises:
        MachineError: The machine lacks a rate that the plan needs.
        PlanError: Operations wait for each other.
    """
    valid = simulate(plan, workload, machine)
    return Steps(valid, simulate(redone(plan), workload, machine) if plan.speculated else None)
