"""A small sweep for tests."""

from __future__ import annotations

from typing import Any

from ebbtide.features.sweep.task import Row, Scenario, Task, combinations, run_task
from ebbtide.interleave.model.workload import Workload
from ebbtide.machines.machine import Machine
from tests.interleave.job_files import machine, workload


def tasks(
    policies: list[str],
    scenarios: list[Scenario] | None = None,
    workloads: list[Workload] | None = None,
    machines: list[Machine] | None = None,
) -> list[Task]:
    pairs = [
        (job, rates, None)
        for job in workloads or [workload()]
        for rates in machines or [machine()]
    ]
    return combinations(pairs, scenarios or [Scenario()], policies)


def rows(*arguments: Any, **options: Any) -> list[Row]:
    """Compute the rows of `tasks` with the same arguments."""
    return [run_task(task) for task in tasks(*arguments, **options)]
