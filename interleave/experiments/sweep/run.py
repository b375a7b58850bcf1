"""Runs a sweep: makes a task for each combination and computes the rows that are not finished yet."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import TypeAlias

from ebbtide.interleave.experiments.sweep.journal import Journal
from ebbtide.interleave.experiments.sweep.scenario import Scenario
from ebbtide.interleave.experiments.sweep.task import Row, Task, failed_row, make_task, run_task, task_key
from ebbtide.interleave.model.workload import Workload
from ebbtide.machines.machine import Machine
from ebbtide.workers import WorkerDied

# Runs a function on tasks by key, and yields (key, outcome) as each is finished.
TaskRunner: TypeAlias = Callable[[Callable[[Task], Row], Mapping[str, Task]], Iterator[tuple[str, Row | WorkerDied]]]


def combinations(
    pairs: Sequence[tuple[Workload, Machine]], scenarios: Sequence[Scenario], policies: Sequence[str]
) -> list[Task]:
    """Return a task for each pair of workload and machine, in each scenario, under each policy, in this order."""
    return [
        make_task(*pair, scenario, policy) for pair, scenario, policy in itertools.product(pairs, scenarios, policies)
    ]


def compute_rows(
    tasks: Sequence[Task], journal: Journal, runner: TaskRunner, progress: Callable[[int, int], None]
) -> list[Row]:
    """Compute the rows of all tasks that are not in the journal, and add them to it.

    Args:
        tasks: Tasks of the sweep.
        journal: Rows that are already finished.
        runner: Runs the tasks.
        progress: Called with the numbers of finished and of all rows, at the start and after each row.

    Returns:
        The rows of all tasks, in their order.
    """
    keys = [task_key(task) for task in tasks]
    finished = journal.rows()
    rows = {key: finished[key] for key in keys if key in finished}
    missing = {key: task for key, task in zip(keys, tasks, strict=True) if key not in finished}
    total = len(rows) + len(missing)
    progress(len(rows), total)
    # Closed at once, also when this is interrupted: then all workers end.
    with closing(runner(run_task, missing)) as outcomes:  # type: ignore[type-var]
        for key, outcome in outcomes:
            if isinstance(outcome, WorkerDied):
                # Not added to the journal: with more memory or other workers it may succeed next time.
                rows[key] = failed_row(missing[key], str(outcome))
            else:
                rows[key] = outcome
                journal.add(key, outcome)
            progress(len(rows), total)
    return [rows[key] for key in keys]
