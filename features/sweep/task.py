"""Combinations of a sweep, which can run in any process, and their rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

from ebbtide.errors import UserError, WorkloadError
from ebbtide.interleave.model.plan import RESOURCES, STORAGE_RESOURCES
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies import Policy, as_policies
from ebbtide.interleave.replay import inputs
from ebbtide.interleave.replay.recorded_job import RecordedJob, recorded_job
from ebbtide.interleave.replay.replay import LATE, default_policies, replay
from ebbtide.machines.catalog import find_machine
from ebbtide.machines.machine import Machine
from ebbtide.profiler.trace import Trace, open_trace
from ebbtide.units import bytes_text
from ebbtide.workers import WorkerDied

# With more of them one replay takes minutes and gigabytes.
_MAX_SUBGROUPS = 100_000
Named = TypeVar("Named", Workload, Machine)
# A workload on a machine, and the job of its trace, None without one.
Pair: TypeAlias = tuple[Workload, Machine, RecordedJob | None]


@dataclass(frozen=True)
class Scenario:
    """Changes to a workload; the defaults leave it as it is."""

    # Factor for the number of parameters. Forward and backward times grow by the same
    # factor (the same operations per parameter and token); free memory shrinks by the
    # half-precision parameters; activations stay.
    scale_params: float = 1.0
    # Lowest value of the free device memory, to which used memory at other times is
    # scaled (`with_min_free`).
    free_bytes: float | None = None
    subgroup_params: int | None = None
    # Host memory that a plan may use; the state beyond it is in storage, where the
    # machine has some.
    host_free_bytes: float | None = None

    def apply_to(self, workload: Workload) -> Workload:
        if self.scale_params != 1:
            workload = _scaled(
                workload, self.scale_params, shrink_free=self.free_bytes is None
            )
        if self.free_bytes is not None:
            workload = replace(
                workload,
                gpu_free=inputs.with_min_free(workload.gpu_free, self.free_bytes),
            )
        if self.subgroup_params is not None:
            workload = replace(
                workload,
                sizes=None,
                subgroup_params=min(self.subgroup_params, workload.params),
            )
        if self.host_free_bytes is not None:
            workload = replace(workload, host_free_bytes=self.host_free_bytes)
        if workload.params / workload.subgroup_params > _MAX_SUBGROUPS:
            raise WorkloadError(
                f"more than {_MAX_SUBGROUPS:,} subgroups: choose larger ones"
            )
        return workload


def _scaled(workload: Workload, factor: float, shrink_free: bool) -> Workload:
    """Scale the number of parameters.

    `shrink_free`: subtract the additional parameters from the free memory.
    """
    if workload.layers:
        raise WorkloadError(
            f"{workload.name} has layers, which are not scaled: leave --scale-params "
            "out"
        )
    params = round(workload.params * factor)
    if params < 1:
        raise WorkloadError(
            f"{factor:g} times {workload.params:,} parameters is less than one "
            "parameter"
        )
    # Recorded subgroups are whole tensors: after scaling, each gets their mean number
    # of parameters.
    mean_params = (
        -(-workload.params // len(workload.subgroups))
        if workload.sizes is not None
        else workload.subgroup_params
    )
    added_bytes = (
        (params - workload.params) * workload.param_bytes if shrink_free else 0.0
    )
    free = workload.gpu_free
    if free is not None:
        free = tuple(
            (_scaled_time(start_s, workload, factor), size - added_bytes)
            for start_s, size in free
        )
        missing_bytes = -min(size for _, size in free)
        if missing_bytes > 0:
            raise WorkloadError(
                f"{factor:g} times the parameters do not fit: they need "
                f"{bytes_text(missing_bytes)} more device memory"
            )
    return replace(
        workload,
        params=params,
        subgroup_params=min(mean_params, params),
        sizes=None,
        forward_s=workload.forward_s * factor,
        backward_s=workload.backward_s * factor,
        gpu_free=free,
    )


def _scaled_time(time_s: float, workload: Workload, factor: float) -> float:
    """Return a time of the iteration in s, with forward and backward `factor` times as
    long."""
    in_compute_s = min(
        max(time_s - workload.other_s, 0.0), workload.forward_s + workload.backward_s
    )
    return time_s + in_compute_s * (factor - 1)


def find_pairs(
    traces: Sequence[Path],
    files: Sequence[Path],
    machines: Sequence[str],
    ranks_per_host: int | None = None,
) -> tuple[list[Pair], dict[Path, UserError]]:
    """Pair each workload with each machine.

    The machine has the rates of one of `ranks_per_host` ranks (None: as many as in the
    trace). Without machines a trace goes with its recorded one, else its card's preset.
    Paths replace equal names.

    Returns the pairs, and the errors of traces that cannot be replayed. Raises
    UserError where no trace can, or one does not exist."""
    sources: list[tuple[Trace | None, RecordedJob | None]] = []
    jobs, own, failed = (
        list[tuple[Workload, str]](),
        list[tuple[Machine, str]](),
        dict[Path, UserError](),
    )
    for path in (*traces, *files):
        try:
            trace = open_trace(path) if path in traces else None
            job = inputs.resolve_workload(trace, None if trace else path)
            recorded = recorded_job(trace) if trace is not None else None
            if not machines:
                own.append(
                    (
                        inputs.resolve_machine(inputs.own_preset(trace), trace),
                        f"the machine of {path}",
                    )
                )
        except UserError as error:
            if path not in traces or not path.exists():
                raise
            failed[path] = error
        else:
            sources.append((trace, recorded))
            jobs.append((job, str(path)))
    if not sources and failed:
        raise next(iter(failed.values()))
    named = _distinct_names([(find_machine(text), text) for text in machines])
    each = (
        [named] * len(sources)
        if machines
        else [[machine] for machine in _distinct_names(own)]
    )
    shared = (
        (workload, trace, inputs.share_box(machine, ranks_per_host, trace), recorded)
        for workload, (trace, recorded), own_machines in zip(
            _distinct_names(jobs), sources, each, strict=True
        )
        for machine in own_machines
    )
    return [
        (inputs.note_other_machine(workload, machine, trace), machine, recorded)
        for workload, trace, machine, recorded in shared
    ], failed


def _distinct_names(items: Sequence[tuple[Named, str]]) -> list[Named]:
    """Rename each item to its source if another one has its name and differs."""
    return [
        replace(item, name=source)
        if any(item.name == other.name and item != other for other, _ in items)
        else item
        for item, source in items
    ]


Row = dict[str, Any]


class Task(NamedTuple):
    """A combination to replay."""

    workload: Workload
    machine: Machine
    scenario: Scenario
    policy: Policy
    job: RecordedJob | None

    def columns(self) -> Row:
        """Return the columns of its row that identify it."""
        return {
            "workload": self.workload.name,
            "machine": self.machine.name,
            "policy": self.policy.text,
            **asdict(self.scenario),
        }


# Runs a function on tasks by key, and yields (key, outcome) as each is finished.
TaskRunner: TypeAlias = Callable[
    [Callable[[Task], Row], Mapping[str, Task]], Iterator[tuple[str, Row | WorkerDied]]
]


# Figures of a result that are several each, or of layers.
NOT_COLUMNS = (
    "busy",
    "storage_busy",
    "weights",
    "activations",
    "job_peak_device_bytes",
)


def run_task(task: Task) -> Row:
    """Compute the row of a task: its figures, or the reason in `error`."""
    try:
        return _replayed_row(task)
    except UserError as error:
        return failed_row(task, str(error))
    except Exception as error:
        # A fault of a policy or of the solver concerns only this combination.
        return failed_row(task, f"{type(error).__name__}: {error}")


def failed_row(task: Task, error: str) -> Row:
    """Return the row of a task that has no figures."""
    return {**task.columns(), "error": " ".join(error.split())}


def _replayed_row(task: Task) -> Row:
    workload = task.scenario.apply_to(task.workload)
    job = task.job
    if job is not None and job.own_update_s is not None:
        job = replace(job, own_update_s=job.own_update_s * task.scenario.scale_params)
    replayed = replay(workload, task.machine, [task.policy], job).as_json()
    (result,) = replayed["results"]
    return {
        **task.columns(),
        "params": workload.params,
        "subgroups": len(workload.subgroups),
        "largest_subgroup_params": max(workload.subgroups),
        "least_free_bytes": workload.min_free_bytes,
        "compute_ms": workload.compute_s * 1e3,
        **{name: value for name, value in result.items() if name not in NOT_COLUMNS},
        # Null where the policy does not use storage.
        **{
            f"{resource}_busy_share": result["busy"].get(resource)
            for resource in (*RESOURCES, *STORAGE_RESOURCES)
        },
        **{f"bound_{name}": value for name, value in replayed["bound"].items()},
        "error": None,
    }


def combinations(
    pairs: Sequence[Pair],
    scenarios: Sequence[Scenario],
    policies: Sequence[Policy | str],
) -> list[Task]:
    """Return a task for each pair of workload and machine, in each scenario, under each
    policy, in order.

    No policies: those that are replayed by default, with late updates."""
    return [
        Task(workload, machine, scenario, policy, job)
        for (workload, machine, job), scenario in itertools.product(pairs, scenarios)
        for policy in as_policies(policies or (*default_policies(workload), LATE))
    ]


def compute_rows(
    tasks: Sequence[Task], runner: TaskRunner, progress: Callable[[int, int], None]
) -> list[Row]:
    """Compute the rows of all tasks, in order.

    `progress` takes the numbers of finished and of all rows.
    """
    by_key, rows = (
        {str(number): task for number, task in enumerate(tasks)},
        dict[str, Row](),
    )
    progress(0, len(tasks))
    # Closed at once, also when this is interrupted: then all workers end.
    with closing(runner(run_task, by_key)) as outcomes:  # type: ignore[type-var]
        for key, outcome in outcomes:
            rows[key] = (
                failed_row(by_key[key], str(outcome))
                if isinstance(outcome, WorkerDied)
                else outcome
            )
            progress(len(rows), len(tasks))
    return [rows[key] for key in by_key]
