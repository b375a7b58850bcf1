"""`ebbtide dry-run`: predict the memory of a training job that has never run, without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ebbtide.cli.command import command
from ebbtide.cli.options import (
    STEPS,
    Force,
    FormerSteps,
    Host,
    machine_in_host,
    machine_option,
    output_option,
    size,
)


@command(
    "Start",
    2,
    runs_a_job=True,
    examples=(
        "dry-run --gpu h100-80gb -o predicted.ebb -- python train.py",
        "dry-run --gpu rtx4090 --steps 3 -- python train.py",
    ),
)
def dry_run(
    command: Annotated[
        list[str], typer.Argument(metavar="-- CMD...", help="Command that starts the job: python train.py ...")
    ],
    output: Annotated[
        Path | None,
        output_option("RUN.ebb", "SCRIPT-TIME.ebb"),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            "--gpu", metavar="NAME", help="GPU that the job sees, by the name of a preset.", show_default="none"
        ),
    ] = None,
    machine: Annotated[str | None, machine_option("none")] = None,
    host: Host = None,
    capacity: Annotated[
        str | None,
        typer.Option(
            "--capacity",
            metavar="SIZE",
            help="Memory of the GPU in bytes, e.g. 80GB.",
            show_default="that of the GPU, if named",
        ),
    ] = None,
    steps: Annotated[int, STEPS] = 2,
    iterations: FormerSteps = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            "--ranks",
            metavar="N",
            help="Ranks of the job; rank 0 is run with process groups of N ranks.",
            min=1,
            show_default="those of torchrun",
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="End with exit code 3 if the job does not fit the memory of the GPU.")
    ] = False,
    force: Force = False,
) -> None:
    """Predict the device memory and the copies of a training job, without a GPU.

    The unmodified script runs on this host with a faked CUDA device: tensors on it have shapes and no values, so that
    they take no memory and no time. The result is a trace like a recorded one. What the job saves is not written.
    """
    from ebbtide.cli.commands.profile import trace_name
    from ebbtide.errors import UserError
    from ebbtide.machines.catalog import find_machine
    from ebbtide.profiler.dryrun.launch import dry_run as start_dry_run

    if gpu is not None and machine is not None:
        raise UserError("name the GPU with --gpu or the machine with --machine, not both")
    number = iterations if iterations is not None else steps
    if not number:
        raise typer.BadParameter("--steps must be at least 1")
    name = machine_in_host(gpu or machine, host)
    start_dry_run(
        command,
        output or Path(trace_name(command)),
        iterations=number,
        capacity_bytes=size(capacity) if capacity is not None else None,
        machine=find_machine(name) if name is not None else None,
        force=force,
        ranks=ranks,
        printer="ebbtide.cli.render.dry_run:print_dry_run",
        check=check,
    )
