"""One combination of a sweep: plain data in, a row of plain data out, wherever it runs."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from typing import Any

import ebbtide
from ebbtide.errors import UserError
from ebbtide.interleave.experiments.sweep.scenario import Scenario
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.replay.results import replay
from ebbtide.machines.machine import Machine

Task = dict[str, Any]
Row = dict[str, Any]


def make_task(workload: Workload, machine: Machine, scenario: Scenario, policy: str) -> Task:
    """All that a worker has to know, and what the row depends on: names, numbers and lists of them."""
    return {
        "ebbtide": ebbtide.__version__,
        "workload": asdict(workload),
        "machine": asdict(machine),
        "scenario": asdict(scenario),
        "policy": policy,
    }


def key_of(task: Task) -> str:
    """The same for the same question, and another for any other."""
    return hashlib.sha256(json.dumps(task, sort_keys=True).encode()).hexdigest()


def run(task: Task) -> Row:
    """The row of a task: its figures, or in `error` why there are none. Raises UserError where this is another ebbtide
    than the one that asks."""
    if task["ebbtide"] != ebbtide.__version__:
        raise UserError(f"a worker has ebbtide {ebbtide.__version__}: install {task['ebbtide']} there")
    try:
        return _replayed(task)
    except UserError as error:
        return failed(task, str(error))
    except Exception as error:
        # A fault of a policy or of the solver concerns this combination alone.
        return failed(task, f"{type(error).__name__}: {error}")


def failed(task: Task, error: str) -> Row:
    """The row of a task that has no figures."""
    return {**question(task), "error": " ".join(error.split())}


def question(task: Task) -> Row:
    """The part of a row that says what was asked."""
    return {
        "workload": task["workload"]["name"],
        "machine": task["machine"]["name"],
        "policy": task["policy"],
        **task["scenario"],
    }


def _replayed(task: Task) -> Row:
    workload = Scenario(**task["scenario"]).of(Workload(**task["workload"]))
    found = replay(workload, Machine(**task["machine"]), [task["policy"]]).as_json()
    (result,) = found["results"]
    return {
        **question(task),
        "params": workload.params,
        "subgroups": len(workload.subgroups),
        "largest_subgroup_params": max(workload.subgroups),
        "least_free_bytes": workload.least_free,
        "compute_ms": workload.compute_s * 1e3,
        **{name: value for name, value in result.items() if name != "busy"},
        **{f"{resource}_busy_share": share for resource, share in result["busy"].items()},
        **{f"bound_{name}": value for name, value in found["bound"].items()},
        "error": None,
    }
