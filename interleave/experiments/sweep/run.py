"""A sweep: the combinations, and their rows, of which some may be finished already."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import TypeAlias

from ebbtide.interleave.experiments.sweep.journal import Journal
from ebbtide.interleave.experiments.sweep.scenario import Scenario
from ebbtide.interleave.experiments.sweep.task import Row, Task, failed, key_of, make_task, run
from ebbtide.interleave.experiments.sweep.workers import WorkerDied
from ebbtide.interleave.model.workload import Workload
from ebbtide.machines.machine import Machine

# Runs tasks by key, and yields (key, outcome) as they are finished.
Workers: TypeAlias = Callable[[Callable[[Task], Row], Mapping[str, Task]], Iterator[tuple[str, Row | WorkerDied]]]


def combinations(
    pairs: Sequence[tuple[Workload, Machine]], scenarios: Sequence[Scenario], policies: Sequence[str]
) -> list[Task]:
    """Each workload on each of its machines, in each scenario, under each policy, in this order."""
    return [
        make_task(*pair, scenario, policy) for pair, scenario, policy in itertools.product(pairs, scenarios, policies)
    ]


def rows_of(
    tasks: Sequence[Task], journal: Journal, workers: Workers, progress: Callable[[int, int], None]
) -> list[Row]:
    """The rows of the tasks, in their order; those that the journal has are not computed again. progress: is told how
    many are finished, of how many, at first and after each."""
    keys = [key_of(task) for task in tasks]
    known = journal.rows()
    found = {key: known[key] for key in keys if key in known}
    missing = {key: task for key, task in zip(keys, tasks, strict=True) if key not in known}
    total = len(found) + len(missing)
    progress(len(found), total)
    # Closed at once, also when this is interrupted: then no worker goes on.
    with closing(workers(run, missing)) as outcomes:  # type: ignore[type-var]
        for key, outcome in outcomes:
            if isinstance(outcome, WorkerDied):
                # Not for the journal: with more memory or other workers it may yet be found.
                found[key] = failed(missing[key], str(outcome))
            else:
                found[key] = outcome
                journal.add(key, outcome)
            progress(len(found), total)
    return [found[key] for key in keys]
