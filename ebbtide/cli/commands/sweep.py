"""`ebbtide sweep`: replay many workloads on many machines under many policies."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from ebbtide.cli.command import command
from ebbtide.cli.options import Force, Json, Plot, Policies, count, size, valued
from ebbtide.cli.outputs import picture_format, save_picture
from ebbtide.cli.reading import check_options
from ebbtide.cli.render.sweep import print_sweep, sweep_progress

if TYPE_CHECKING:
    from ebbtide.interleave.experiments.sweep.task import Row, Scenario, Task, TaskRunner

_MAX_COMBINATIONS = 100_000
Value = TypeVar("Value")


@command(
    "Predict",
    3,
    examples=(
        "sweep run.ebb --machine rtx4090 --machine h200 -o sweep.parquet",
        "sweep run.ebb --policy adaptive --scale-params 1,2,4 -o sweep.parquet",
    ),
)
def sweep(
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE", help="Parquet file to write, one row per combination.")
    ],
    traces: Annotated[
        list[Path] | None, typer.Argument(metavar="RUN.ebb...", help="Traces to take workloads from.")
    ] = None,
    workload: Annotated[
        list[Path] | None, valued("W.json", "Workload file to replay in addition to traces. Repeatable.")
    ] = None,
    machine: Annotated[
        list[str] | None,
        valued("M", "Machine file, or name of a preset. Repeatable.", "the one recorded in each trace"),
    ] = None,
    policy: Policies = None,
    scale_params: Annotated[
        list[str] | None,
        valued(
            "F,...",
            "Factors for the number of parameters. Forward and backward times are scaled, free memory shrinks.",
            "1",
        ),
    ] = None,
    free_bytes: Annotated[
        list[str] | None,
        valued("SIZE,...", "Lowest free device memory of the iteration in bytes, e.g. 0,20GB.", "that of the workload"),
    ] = None,
    subgroup_params: Annotated[
        list[str] | None, valued("N,...", "Parameters per subgroup, e.g. 1e8,5e8.", "those of the workload")
    ] = None,
    host_free_bytes: Annotated[
        list[str] | None,
        valued(
            "SIZE,...",
            "Host memory that a policy may use, e.g. 64GB,128GB. State beyond it is in storage.",
            "that of the workload, else of the machine",
        ),
    ] = None,
    plot: Plot = None,
    jobs: Annotated[int | None, valued("N", "Number of worker processes.", "number of cores", parser=count)] = None,
    scheduler: Annotated[
        str | None, valued("ADDRESS", "Address of the scheduler of a Dask cluster to run on.", "this machine")
    ] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Replay every workload on every machine under every policy into one table.

    Run the same command again to continue a stopped sweep: finished rows are kept in a file next to the output.
    """
    scenarios = _scenarios(scale_params or [], free_bytes or [], subgroup_params or [], host_free_bytes or [])
    if not (traces or workload):
        raise typer.BadParameter("nothing to replay: give traces, or workload files with --workload")
    if plot is not None:
        picture_format(plot)
    if plot is not None and plot.resolve() == output.resolve():
        raise typer.BadParameter(f"{plot} cannot be both the table and the picture: choose two files")
    check_options(jobs, scheduler)

    from ebbtide import host_limits
    from ebbtide.errors import UserError
    from ebbtide.interleave.experiments.sweep.task import combinations, find_pairs
    from ebbtide.interleave.policies import BUILT_IN, parse, with_systems
    from ebbtide.workers import run_locally, run_on_cluster

    # Fail before the work is done, not after it.
    for path in (output, plot):
        if path is not None and os.path.lexists(path) and not force:
            raise UserError(f"{path} exists already: choose another path, or replace it with --force")
        if path is not None and not path.parent.is_dir():
            raise UserError(f"cannot write {path}: there is no folder {path.parent}")
    policies = _distinct(with_systems(policy or BUILT_IN))
    for text in policies:
        parse(text)
    pairs = find_pairs(_distinct(traces or []), _distinct(workload or []), _distinct(machine or []))
    total = len(pairs) * len(scenarios) * len(policies)
    if total > _MAX_COMBINATIONS:
        raise UserError(f"{total:,} combinations: sweep at most {_MAX_COMBINATIONS:,} at once")
    runner = (
        partial(run_on_cluster, address=scheduler)
        if scheduler
        else partial(run_locally, jobs=jobs or host_limits.cores())
    )
    rows = _run(combinations(pairs, scenarios, policies), runner, output, plot, force)
    print_sweep(rows, output, as_json)


def _run(tasks: list[Task], runner: TaskRunner, output: Path, plot: Path | None, force: bool) -> list[Row]:
    """Compute all rows and write the outputs. Raises UserError if no combination can be replayed."""
    from ebbtide.errors import UserError
    from ebbtide.interleave.experiments.sweep.best import write_rows
    from ebbtide.interleave.experiments.sweep.picture import check_panels, draw_sweep
    from ebbtide.interleave.experiments.sweep.task import Journal, compute_rows, journal_path, scenario_columns
    from ebbtide.output_files import new_output

    if plot is not None:
        check_panels([scenario_columns(task) for task in tasks])
    with Journal(journal_path(output)) as journal:
        with sweep_progress() as progress:
            rows = compute_rows(tasks, journal, runner, progress)
        if all(row["error"] for row in rows):
            journal.delete()
            raise UserError(f"none of the {len(rows)} combinations can be replayed; the first: {rows[0]['error']}")
        with new_output(output, force, Path.is_file, "a file") as temporary:
            write_rows(rows, tasks, temporary)
            if plot is not None:
                with new_output(plot, force, Path.is_file, "a file") as picture:
                    save_picture(draw_sweep(rows), picture, plot)
        journal.delete()
    return rows


def _scenarios(scale: list[str], free: list[str], subgroup: list[str], host_free: list[str]) -> list[Scenario]:
    """Return all combinations of the values of the options; options that are not given change nothing."""
    factors = _values("--scale-params", scale, _factor) or [1.0]
    sizes: list[float | None] = [*_values("--free-bytes", free, _size)] or [None]
    counts: list[int | None] = [*_values("--subgroup-params", subgroup, _at_least_one)] or [None]
    host_sizes: list[float | None] = [*_values("--host-free-bytes", host_free, _size)] or [None]

    from ebbtide.interleave.experiments.sweep.task import Scenario

    return [Scenario(*values) for values in itertools.product(factors, sizes, counts, host_sizes)]


def _values(option: str, texts: list[str], read: Callable[[str], Value]) -> list[Value]:
    """Return the values of an option that is repeated or has several values separated by commas."""
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
        raise typer.BadParameter(f"{text!r} is not a factor: write a number above 0, e.g. 0.5 or 2")
    return value


def _size(text: str) -> float:
    return 0.0 if text.strip() == "0" else float(size(text))


def _at_least_one(text: str) -> int:
    if (value := count(text)) < 1:
        raise typer.BadParameter(f"{text!r}: a subgroup has at least one parameter")
    return value
