"""One combination of a sweep: its input and its row are plain data, so that it can run in any process."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from typing import Any

import ebbtide
from ebbtide.errors import UserError
from ebbtide.interleave.experiments.sweep.scenario import Scenario
from ebbtide.interleave.model.plan import RESOURCES, STORAGE_RESOURCES
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.replay.results import replay
from ebbtide.machines.machine import Machine, machine_from

Task = dict[str, Any]
Row = dict[str, Any]


def make_task(workload: Workload, machine: Machine, scenario: Scenario, policy: str) -> Task:
    """Return everything that the row depends on, as names, numbers and lists of them."""
    return {
        "ebbtide": ebbtide.__version__,
        "workload": asdict(workload),
        "machine": machine.as_json(),
        "scenario": asdict(scenario),
        "policy": policy,
    }


def task_key(task: Task) -> str:
    """Return a digest that is equal only for equal tasks."""
    return hashlib.sha256(json.dumps(task, sort_keys=True).encode()).hexdigest()


def run_task(task: Task) -> Row:
    """Compute the row of a task: its figures, or the reason in `error` if there are none.

    Raises:
        UserError: This process has another version of ebbtide than the one that made the task.
    """
    if task["ebbtide"] != ebbtide.__version__:
        raise UserError(f"a worker has ebbtide {ebbtide.__version__}: install {task['ebbtide']} there")
    try:
        return _replayed_row(task)
    except UserError as error:
        return failed_row(task, str(error))
    except Exception as error:
        # A fault of a policy or of the solver concerns only this combination.
        return failed_row(task, f"{type(error).__name__}: {error}")


def failed_row(task: Task, error: str) -> Row:
    """Return the row of a task that has no figures."""
    return {**scenario_columns(task), "error": " ".join(error.split())}


def scenario_columns(task: Task) -> Row:
    """Return the columns of a row that identify its combination."""
    return {
        "workload": task["workload"]["name"],
        "machine": task["machine"]["name"],
        "policy": task["policy"],
        **task["scenario"],
    }


def _replayed_row(task: Task) -> Row:
    workload = Scenario(**task["scenario"]).apply_to(Workload(**task["workload"]))
    machine = machine_from(task["machine"], task["machine"]["name"])
    replayed = replay(workload, machine, [task["policy"]]).as_json()
    (result,) = replayed["results"]
    return {
        **scenario_columns(task),
        "params": workload.params,
        "subgroups": len(workload.subgroups),
        "largest_subgroup_params": max(workload.subgroups),
        "least_free_bytes": workload.min_free_bytes,
        "compute_ms": workload.compute_s * 1e3,
        **{name: value for name, value in result.items() if name not in ("busy", "storage_busy")},
        # Null where the policy does not use storage.
        **{f"{resource}_busy_share": result["busy"].get(resource) for resource in (*RESOURCES, *STORAGE_RESOURCES)},
        **{f"bound_{name}": value for name, value in replayed["bound"].items()},
        "error": None,
    }
