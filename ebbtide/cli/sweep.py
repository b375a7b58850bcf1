"""`ebbtide sweep`: replay many workloads on many machines under many policies."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from ebbtide.cli.options import Force, Json, Plot, Policies, count, size
from ebbtide.cli.outputs import picture_format
from ebbtide.cli.render.sweep import progress, tell_best

if TYPE_CHECKING:
    from ebbtide.interleave.experiments.sweep import Row, Scenario, Task, Workers

_MOST_COMBINATIONS = 100_000
Value = TypeVar("Value")


def sweep(
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="Table to write, a Parquet file.")],
    traces: Annotated[
        list[Path] | None, typer.Argument(metavar="RUN.ebb...", help="Traces whose workloads are replayed.")
    ] = None,
    workload: Annotated[list[Path] | None, typer.Option(metavar="W.json", help="Workload file. Repeatable.")] = None,
    machine: Annotated[
        list[str] | None,
        typer.Option(
            metavar="M", help="Machine file, or name of a preset. Repeatable.", show_default="those of the traces"
        ),
    ] = None,
    policy: Policies = None,
    scale_params: Annotated[
        list[str] | None,
        typer.Option(
            metavar="F,...",
            help="Factors for the number of parameters. Forward and backward times grow with it, free memory shrinks.",
        ),
    ] = None,
    free_bytes: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SIZE,...",
            help="Device memory that is free where the iteration leaves least, e.g. 0,20GB.",
        ),
    ] = None,
    subgroup_params: Annotated[
        list[str] | None, typer.Option(metavar="N,...", help="Parameters per subgroup, e.g. 1e8,5e8.")
    ] = None,
    plot: Plot = None,
    jobs: Annotated[
        int | None,
        typer.Option(help="Processes that run at once.", parser=count, metavar="N", show_default="number of cores"),
    ] = None,
    scheduler: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Run on the Dask cluster of this scheduler.")
    ] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Replay every workload on every machine under every policy into one table.

    A stopped sweep continues when the same command is run again: finished rows are kept in a file beside the output.
    """
    scenarios = _scenarios(scale_params or [], free_bytes or [], subgroup_params or [])
    if not (traces or workload):
        raise typer.BadParameter("nothing to replay: name traces, or workload files with --workload")
    if plot is not None:
        picture_format(plot)
    if plot is not None and plot.resolve() == output.resolve():
        raise typer.BadParameter(f"{plot} cannot be both the table and the picture: name two files")
    if scheduler == "":
        raise typer.BadParameter("--scheduler needs an address, like tcp://host:8786")
    if jobs == 0 or (jobs and scheduler):
        raise typer.BadParameter(
            "--jobs is at least 1, and does not go with --scheduler: a cluster has its own workers"
        )

    from ebbtide.errors import UserError
    from ebbtide.interleave.experiments.sweep import combinations, find_pairs, on_cluster, on_this_machine
    from ebbtide.interleave.policies import BUILT_IN, parse

    # What is known before the work is done is not told after it.
    for path in (output, plot):
        if path is not None and os.path.lexists(path) and not force:
            raise UserError(f"{path} exists already: choose another, or replace it with --force")
        if path is not None and not path.parent.is_dir():
            raise UserError(f"cannot write {path}: there is no folder {path.parent}")
    policies = _once(policy or BUILT_IN)
    for text in policies:
        parse(text)
    pairs = find_pairs(_once(traces or []), _once(workload or []), _once(machine or []))
    total = len(pairs) * len(scenarios) * len(policies)
    if total > _MOST_COMBINATIONS:
        raise UserError(f"these are {total:,} combinations: sweep at most {_MOST_COMBINATIONS:,} at once")
    cores = len(os.sched_getaffinity(0))
    workers = partial(on_cluster, address=scheduler) if scheduler else partial(on_this_machine, jobs=jobs or cores)
    rows = _run(combinations(pairs, scenarios, policies), workers, output, plot, force)
    tell_best(rows, output, as_json)


def _run(tasks: list[Task], workers: Workers, output: Path, plot: Path | None, force: bool) -> list[Row]:
    """Raises UserError where no combination can be replayed, or nothing be written."""
    from ebbtide.analysis.plot import save
    from ebbtide.errors import UserError
    from ebbtide.interleave.experiments.sweep import Journal, journal_path, question, rows_of, write_rows
    from ebbtide.interleave.experiments.sweep.picture import check_room, draw
    from ebbtide.output_files import new_output

    if plot is not None:
        check_room([question(task) for task in tasks])
    with Journal(journal_path(output)) as journal:
        with progress() as tell:
            rows = rows_of(tasks, journal, workers, tell)
        if all(row["error"] for row in rows):
            journal.drop()
            raise UserError(f"none of the {len(rows)} combinations can be replayed; the first: {rows[0]['error']}")
        with new_output(output, force, Path.is_file, "a file") as temporary:
            write_rows(rows, tasks, temporary)
            if plot is not None:
                with new_output(plot, force, Path.is_file, "a file") as picture:
                    save(draw(rows), picture, picture_format(plot))
        journal.drop()
    return rows


def _scenarios(scale: list[str], free: list[str], subgroup: list[str]) -> list[Scenario]:
    """All combinations of the values of the options; what is not asked for stays as it is."""
    factors = _values("--scale-params", scale, _factor) or [1.0]
    sizes: list[float | None] = [*_values("--free-bytes", free, _size)] or [None]
    counts: list[int | None] = [*_values("--subgroup-params", subgroup, _at_least_one)] or [None]

    from ebbtide.interleave.experiments.sweep import Scenario

    return [Scenario(*values) for values in itertools.product(factors, sizes, counts)]


def _values(option: str, texts: list[str], read: Callable[[str], Value]) -> list[Value]:
    """The values of an option that takes several, with commas or by being repeated."""
    try:
        return _once(read(part) for text in texts for part in text.split(","))
    except typer.BadParameter as error:
        raise typer.BadParameter(f"{option}: {error.message}") from None


def _once(values: Iterable[Value]) -> list[Value]:
    return list(dict.fromkeys(values))


def _factor(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1e-6 <= value <= 1e6:
        raise typer.BadParameter(f"{text!r} is not a factor: write a number above 0, like 0.5 or 2")
    return value


def _size(text: str) -> float:
    return 0.0 if text.strip() == "0" else float(size(text))


def _at_least_one(text: str) -> int:
    if (value := count(text)) < 1:
        raise typer.BadParameter(f"{text!r}: a subgroup has at least one parameter")
    return value
