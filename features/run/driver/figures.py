"""Measured figures of an engine's steps, beside what a simulation predicts."""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import Any, Protocol

from ebbtide.errors import UserError
from ebbtide.interleave.model.schedule import Schedule
from ebbtide.interleave.simulation.simulator import simulate
from ebbtide.machines.machine import Machine

TIMES = ("iteration", "forward", "backward", "update", "exposed")
# Steps under a plan before its figures count.
_WARM_UP = 2


class Measured(Protocol):
    """An optimizer, or its updates, that an engine runs."""

    @property
    def last_schedule(self) -> Schedule | None: ...

    @property
    def machine(self) -> Machine: ...


class RunFigures:
    """Collects the schedules of the steps under the last plan."""

    def __init__(self) -> None:
        self.result: dict[str, Any] = {}
        self._schedules: list[Schedule] = []
        self._machine: Machine | None = None
        self._peak_bytes = 0

    def add(self, updater: Measured) -> None:
        """Add the last step."""
        schedule = updater.last_schedule
        if schedule is None:
            return
        if self._schedules and self._schedules[-1].plan is not schedule.plan:
            self._schedules.clear()
        if not self._schedules:
            # The rates that the plan was made with.
            self._machine = updater.machine
        self._schedules.append(schedule)
        if schedule.measured is not None:
            self._peak_bytes = max(self._peak_bytes, schedule.measured.device)

    def end(self) -> None:
        """Sum up the steps, after the last one."""
        counted = self._schedules[_WARM_UP:] or self._schedules
        if not counted or self._machine is None:
            return
        last = counted[-1]
        phases = {
            name: median(getattr(one.workload, name) for one in counted)
            for name in ("forward_s", "backward_s")
        }
        self.result = {
            "plan": last.plan.counts(),
            "counted": len(counted),
            "device_bytes": self._peak_bytes,
            "host_bytes": last.measured.host if last.measured else None,
            "h2d_bytes": last.moved_bytes("h2d"),
            "d2h_bytes": last.moved_bytes("d2h"),
            "measured_ms": {
                name: 1e3 * median(getattr(one, f"{name}_s") for one in counted)
                for name in TIMES
            },
        }
        try:
            workload = replace(last.workload, **phases)
            predicted = simulate(last.plan, workload, self._machine)
        except UserError:
            return
        self.result["predicted_ms"] = {
            name: 1e3 * getattr(predicted, f"{name}_s") for name in TIMES
        }
        self.result["predicted_device_bytes"] = predicted.peak_device_bytes
        self.result["predicted_host_bytes"] = predicted.host_bytes()
