"""`ebbtide sweep`: replay many jobs on many machines, under many policies, at many
sizes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from ebbtide.cli import options
from ebbtide.cli.command import command
from ebbtide.cli.options import count, size
from ebbtide.cli.outputs import check_outputs, print_outputs, save_picture
from ebbtide.cli.printing import echo, echo_line, print_view, progress_bar
from ebbtide.cli.reading import check_options
from ebbtide.units import NOT_KNOWN

if TYPE_CHECKING:
    from ebbtide.features.sweep.task import Row, Scenario, Task, TaskRunner

_MAX_COMBINATIONS = 100_000
Value = TypeVar("Value")


@dataclass(frozen=True)
class Sweep:
    """Combinations to replay, as options say them.

    Empty lists stand for their defaults.
    """

    traces: list[Path]
    workloads: list[Path]
    machines: list[str]
    policies: list[str]
    ranks_per_host: int | None
    scale_params: list[str]
    free_bytes: list[str]
    subgroup_params: list[str]
    host_free_bytes: list[str]

    def scenarios(self) -> list[Scenario]:
        """Return all combinations of the sizes; what is not given stays as it is."""
        factors = _values("--scale-params", self.scale_params, _factor) or [1.0]
        sizes: list[float | None] = [
            *_values("--free-bytes", self.free_bytes, _size)
        ] or [None]
        counts: list[int | None] = [
            *_values("--subgroup-params", self.subgroup_params, _at_least_one)
        ] or [None]
        host_sizes: list[float | None] = [
            *_values("--host-free-bytes", self.host_free_bytes, _size)
        ] or [None]

        from ebbtide.features.sweep.task import Scenario

        return [
            Scenario(*values)
            for values in itertools.product(factors, sizes, counts, host_sizes)
        ]

    def tasks(self, scenarios: list[Scenario]) -> tuple[list[Task], list[Row]]:
        """Return all combinations, and rows for traces that cannot be replayed.

        Raises UserError for too many, and for names that do not exist.
        """
        from ebbtide.errors import UserError
        from ebbtide.features.sweep.task import combinations, find_pairs
        from ebbtide.interleave.policies import BUILT_IN, as_policies

        policies = _distinct(as_policies(self.policies))
        traces, workloads, machines = (
            _distinct(self.traces),
            _distinct(self.workloads),
            _distinct(self.machines),
        )
        pairs, failed = find_pairs(traces, workloads, machines, self.ranks_per_host)
        total = (len(pairs) + len(failed)) * len(scenarios) * len(policies or BUILT_IN)
        if total > _MAX_COMBINATIONS:
            raise UserError(
                f"{total:,} combinations: replay at most {_MAX_COMBINATIONS:,} at once"
            )
        tasks = combinations(pairs, scenarios, policies)
        names = (
            _distinct(task.machine.name for task in tasks) if machines else [NOT_KNOWN]
        )
        cases = itertools.product(
            failed.items(),
            names,
            scenarios,
            _distinct(task.policy.text for task in tasks),
        )
        return tasks, [
            {
                "workload": str(path),
                "machine": name,
                "policy": policy,
                **asdict(scenario),
                "error": str(error),
            }
            for (path, error), name, scenario, policy in cases
        ]


@dataclass(frozen=True)
class SweepOutputs:
    """The files and the text that a sweep makes."""

    table: Path | None
    plot: Path | None
    force: bool
    print_all: bool
    as_json: bool


@command(
    "Predict",
    examples=(
        "sweep a.ebb b.ebb --machine rtx4090 --machine h200 -o table.parquet",
        "sweep run.ebb --machine h100-80gb --scale-params 1,2,4 --plot sweep.png",
    ),
)
def sweep(
    sources: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="(RUN.ebb|W.json)...", help="Traces and workload files."
        ),
    ] = None,
    workload: Annotated[list[Path] | None, options.WORKLOAD] = None,
    machine: Annotated[
        list[str] | None,
        options.machine_option("the recorded one, else that of the trace's card"),
    ] = None,
    host: options.Host = None,
    ranks_per_host: options.RanksPerHost = None,
    policy: Annotated[
        list[str] | None,
        options.policy_option("all built-in ones; systems: all other systems"),
    ] = None,
    scale_params: Annotated[
        list[str] | None,
        options.valued(
            "F,...",
            "Factors for the number of parameters. Forward and backward times are "
            "scaled, free memory shrinks.",
            "1",
        ),
    ] = None,
    free_bytes: Annotated[
        list[str] | None,
        options.valued(
            "SIZE,...",
            "Least device memory in bytes that the job leaves free, e.g. 20GiB: the "
            "free memory is shifted to it.",
            "that of the trace or workload",
        ),
    ] = None,
    subgroup_params: Annotated[
        list[str] | None,
        options.valued(
            "N,...", "Parameters per subgroup, e.g. 1e8.", "those of the workload"
        ),
    ] = None,
    host_free_bytes: Annotated[
        list[str] | None,
        options.valued(
            "SIZE,...",
            "Host memory in bytes that the optimizer may use, e.g. 64GiB. State "
            "beyond it is in storage.",
            "that of the workload, else the host memory of the machine",
        ),
    ] = None,
    print_all: Annotated[
        bool, typer.Option("--all", help="Print all combinations, not the best alone.")
    ] = False,
    output: Annotated[
        Path | None, options.output_option("TABLE.parquet", "no file")
    ] = None,
    plot: options.Plot = None,
    jobs: Annotated[int | None, options.jobs_option("one per core")] = None,
    scheduler: options.Scheduler = None,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Predict the iterations of several jobs on several machines under several
    policies, at several sizes.

    All combinations are replayed, as `ebbtide replay` does; -o writes a table of
    them."""
    traces: list[Path] = []
    files = [*(workload or ())]
    for source in sources or ():
        (traces if source.is_dir() else files).append(source)
    machines = [
        options.machine_in_host(name, host) for name in [*(machine or ())] or [None]
    ]
    combinations = Sweep(
        traces=traces,
        workloads=files,
        machines=[name for name in machines if name is not None],
        policies=policy or [],
        ranks_per_host=ranks_per_host,
        scale_params=scale_params or [],
        free_bytes=free_bytes or [],
        subgroup_params=subgroup_params or [],
        host_free_bytes=host_free_bytes or [],
    )
    if not (traces or files):
        raise typer.BadParameter("nothing to replay: give traces or workload files")
    check_options(jobs, scheduler)
    _replay(
        combinations,
        SweepOutputs(output, plot, force, print_all, as_json),
        jobs,
        scheduler,
    )


def _replay(
    sweep: Sweep, outputs: SweepOutputs, jobs: int | None, scheduler: str | None
) -> None:
    """Replay every job on every machine under every policy at every size.

    Print the best ones.
    """
    scenarios = sweep.scenarios()
    check_outputs([outputs.plot], outputs.table)

    from ebbtide import host_limits
    from ebbtide.workers import runner

    tasks, failed = sweep.tasks(scenarios)
    run = runner(jobs or host_limits.cores(), scheduler)
    notes = _distinct(note for task in tasks for note in task.workload.notes)
    _print(_run(tasks, failed, run, outputs), notes, outputs)


def _run(
    tasks: list[Task], failed: list[Row], runner: TaskRunner, outputs: SweepOutputs
) -> list[Row]:
    """Compute the rows of tasks, and write the outputs with those that failed. Raises
    UserError without any result."""
    from ebbtide.errors import UserError
    from ebbtide.features.sweep.best import write_rows
    from ebbtide.features.sweep.task import compute_rows
    from ebbtide.output_files import new_output

    if outputs.plot is not None:
        from ebbtide.features.sweep.picture import Grid, draw_sweep

        # Raises UserError for more panels or policies than anybody can read.
        Grid.of([*(task.columns() for task in tasks), *failed])
    with ExitStack() as files:
        # Before the work is done: a path that cannot be written is refused here.
        table, picture = (
            files.enter_context(new_output(path, outputs.force, Path.is_file, "a file"))
            if path is not None
            else None
            for path in (outputs.table, outputs.plot)
        )
        update = files.enter_context(progress_bar())
        rows = compute_rows(
            tasks,
            runner,
            lambda done, total: update(f"{done} of {total} combinations", done, total),
        )
        rows += failed
        if all(row["error"] for row in rows):
            raise UserError(
                f"none of the {len(rows)} combinations can be replayed; the first: "
                f"{rows[0]['error']}"
            )
        if table is not None:
            write_rows(rows, tasks, table)
        if picture is not None:
            save_picture(draw_sweep(rows), picture, outputs.plot)
    return rows


def _print(rows: list[Row], notes: list[str], outputs: SweepOutputs) -> None:
    """Print the tables of a sweep and notes on its workloads.

    Or print one JSON object; the path of its file is on stderr.
    """
    from ebbtide.features.sweep.best import BASELINE, find_best, sweep_view

    best = find_best(rows)
    if outputs.as_json:
        summary = {
            "output": str(outputs.table) if outputs.table is not None else None,
            "rows": len(rows),
            "errors": sum(bool(row["error"]) for row in rows),
            "baseline": BASELINE,
            "best": [item.as_json() for item in best],
        }
        echo(json.dumps(summary))
        return
    print_view(sweep_view(rows, outputs.table, outputs.print_all))
    if notes:
        echo_line(
            "note: "
            f"{notes[0]}{f' (and {len(notes) - 1} more)' if len(notes) > 1 else ''}"
        )
    options = (
        [f"--all (all {len(rows):,} combinations)"]
        if len(rows) > len(best) and not outputs.print_all
        else []
    )
    echo_line(
        f"next: {', '.join([*options, 'ebbtide replay --recommend for one of them'])}"
    )
    print_outputs(outputs.table)


def _values(option: str, texts: list[str], read: Callable[[str], Value]) -> list[Value]:
    """Return the values of an option that is repeated or has values separated by
    commas."""
    try:
        return _distinct(read(part) for text in texts for part in text.split(","))
    except typer.BadParameter as error:
        raise typer.BadParameter(f"{option}: {error.message}") from None


def _distinct(values: Iterable[Value]) -> list[Value]:
    return list(dict.fromkeys(values))


def _factor(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1e-6 <= value <= 1e6:
        raise typer.BadParameter(
            f"{text!r} is not a factor: write a number above 0, e.g. 0.5 or 2"
        )
    return value


def _size(text: str) -> float:
    return 0.0 if text.strip() == "0" else float(size(text))


def _at_least_one(text: str) -> int:
    if (value := count(text)) < 1:
        raise typer.BadParameter(f"{text!r}: a subgroup has at least one parameter")
    return value
