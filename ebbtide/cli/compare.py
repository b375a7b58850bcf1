"""`ebbtide compare`: run policies and compare them with their prediction."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from ebbtide.cli.options import Force, Json, Plot, count, size
from ebbtide.cli.outputs import check_outputs, new_outputs, picture_format, tell_outputs


def compare(
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            metavar="P",
            help="Offload policy, e.g. interleaved:3. Repeatable.",
            show_default="zero-offload, pipelined, twin-flow:0.5, interleaved:2, adaptive",
        ),
    ] = None,
    iterations: Annotated[
        int,
        typer.Option(help="Iterations per policy; the first two are left out of medians.", parser=count, metavar="N"),
    ] = 12,
    params: Annotated[
        int, typer.Option(help="Approximate number of parameters of the model, e.g. 5e8.", parser=count, metavar="N")
    ] = 20_000_000,
    subgroup_params: Annotated[
        int | None,
        typer.Option(help="Parameters per subgroup.", parser=count, metavar="N", show_default="a tenth of the model"),
    ] = None,
    memory_budget: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Device memory for optimizer state, e.g. 2GiB.",
            show_default="half of the state and three subgroups",
        ),
    ] = None,
    emulate_link: Annotated[
        str | None,
        typer.Option(
            metavar="RATE",
            help="Emulate the device, with a link of this many bytes/s per direction, e.g. 2GB.",
            show_default="1GB where there is no GPU",
        ),
    ] = None,
    machine: Annotated[
        str | None,
        typer.Option(
            metavar="M",
            help="Machine file to predict with; an emulated device has its own link and GPU.",
            show_default="this machine, measured",
        ),
    ] = None,
    against: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="Other optimizers to measure: torch, deepspeed, torchao.")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of weights and tokens.", min=0, max=2**63 - 1)] = 0,
    plot: Plot = None,
    save: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Also write a measured and a predicted trace per policy.")
    ] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Train a small model under each policy and compare measured with predicted times and losses.

    Without a GPU the device is emulated: times then say nothing about a GPU, only whether the plan ran as predicted.
    The exit status is 1 if the losses differ by a bit.
    """
    check_outputs(plot, save)
    if subgroup_params == 0:
        raise typer.BadParameter("--subgroup-params is at least 1")
    budget = size(memory_budget) if memory_budget is not None else None
    rate = size(emulate_link) if emulate_link is not None else None
    _settle_threads()

    from ebbtide.analysis.plot import save as save_figure
    from ebbtide.cli.render.compare import print_comparison
    from ebbtide.interleave.experiments.compare.compare import Asked
    from ebbtide.interleave.experiments.compare.compare import compare as run
    from ebbtide.interleave.experiments.compare.picture import picture
    from ebbtide.interleave.experiments.compare.saving import save_traces
    from ebbtide.interleave.replay.resolve import find_machine

    # What is written stands whole, or not at all, before anything is printed.
    with new_outputs(plot, save, force) as (image, folder):
        asked = Asked(
            policies=policy,
            iterations=iterations,
            params=params,
            subgroup_params=subgroup_params,
            memory_budget=budget,
            link_bytes_per_s=rate,
            machine=find_machine(machine, None) if machine is not None else None,
            peers=[name.strip() for name in against.split(",")] if against is not None else [],
            seed=seed,
        )
        with _progress() as tell:
            found = run(asked, tell)
        if image is not None and plot is not None:
            save_figure(picture(found), image, picture_format(plot))
        if folder is not None:
            save_traces(found, folder)
    if as_json:
        typer.echo(json.dumps(found.as_json()))
    else:
        print_comparison(found)
    tell_outputs(plot, save)
    if not found.losses_equal:
        differ = ", ".join(result.policy for result in found.results if not result.losses_equal)
        typer.echo(f"ebbtide: the losses of {differ} are not those of {found.results[0].policy}: a fault", err=True)
        raise typer.Exit(1)


def _settle_threads() -> None:
    """What has to be set before torch is there."""
    # Else matrix products on a GPU differ from run to run.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Threads of torch that wait for more to do leave the cores to the updates.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], object]]:
    """A bar on stderr; none where that is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        line = bar.add_task("")
        yield lambda label, done, total: bar.update(line, description=label, completed=done, total=total)
