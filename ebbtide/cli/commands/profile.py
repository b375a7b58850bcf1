"""`ebbtide profile`: record a training job."""

from __future__ import annotations

import os
import re
import socket
import time
from pathlib import Path
from typing import Annotated, Literal

import typer

from ebbtide import seams
from ebbtide.cli.command import command
from ebbtide.cli.options import (
    STEPS,
    Force,
    Iterations,
    Metrics,
    count,
    metrics_server,
    optional_size,
    output_option,
    valued,
)
from ebbtide.cli.options import iterations as parse_iterations
from ebbtide.urls import location

_PLACEHOLDER = re.compile(r"\{[^{}]*\}")


@command(
    "Start",
    1,
    runs_a_job=True,
    examples=(
        "profile -o run.ebb -- python train.py",
        "profile --transfers -- torchrun --nproc-per-node 4 train.py",
    ),
)
def profile(
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- CMD...",
            help="Command that starts the job: python, torchrun, deepspeed, ...",
        ),
    ] = None,
    output: Annotated[str | None, output_option("RUN.ebb", "SCRIPT-TIME.ebb")] = None,
    force: Force = False,
    iterations: Iterations = None,
    steps: Annotated[int | None, STEPS] = None,
    max_size: Annotated[
        str | None,
        valued(
            "SIZE",
            "Size of the trace at which recording stops, e.g. 2GiB; the job continues.",
            "no limit",
        ),
    ] = None,
    allocator_iterations: Annotated[
        int,
        typer.Option(
            help=(
                "Number of iterations in which every allocation is recorded, with "
                "call stacks; slows these down."
            ),
            parser=count,
            metavar="N",
        ),
    ] = 0,
    transfers: Annotated[
        bool,
        typer.Option(
            "--transfers",
            help=(
                "Record copies and kernels of the GPU with CUPTI; slows the job "
                "slightly."
            ),
        ),
    ] = False,
    poll: Annotated[
        float,
        valued(
            "MS",
            "Interval of memory readings during phases in ms; 0 for none.",
            min=0,
            max=60_000,
        ),
    ] = 25.0,
    record: Annotated[
        Literal["all", "phases"],
        typer.Option(
            help=(
                "What the job's processes record: everything, or phases without "
                "memory, at the least cost."
            )
        ),
    ] = "all",
    watch: Annotated[
        bool,
        typer.Option(
            "--watch",
            help=(
                "Show the recording in this terminal while the job runs, as `ebbtide "
                "watch` does; the job's output "
                "goes to RUN.log."
            ),
        ),
    ] = False,
    metrics: Metrics = None,
    on_demand: Annotated[
        bool,
        typer.Option(
            "--on-demand",
            help="Record phases alone, and details when --attach asks for them.",
        ),
    ] = False,
    attach: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN.ebb",
            help=(
                "Instead of starting a job, record details of --steps or --iterations "
                "of the one recorded here."
            ),
            show_default=False,
        ),
    ] = None,
    wait: Annotated[
        bool, typer.Option(help="With --attach, wait until the details are recorded.")
    ] = True,
) -> int:
    """Record the phases, memory and link use of a training job.

    The job takes the place of this command: it runs unchanged, with its own process id,
    output, signals and exit status. The trace is finished when it has ended. In a
    terminal it is a child of this command, which waits for the trace. In its name
    {host} is the name of this host."""
    from ebbtide.profiler.agent.options import Options
    from ebbtide.profiler.recording.collector import RecordedCommand
    from ebbtide.profiler.recording.launch import profile as profile_job
    from ebbtide.profiler.recording.launch import profile_in_terminal

    if attach is not None:
        if (
            command
            or on_demand
            or output
            or force
            or max_size
            or record != "all"
            or watch
            or metrics is not None
        ):
            raise typer.BadParameter(
                "--attach takes only --steps or --iterations, --poll, --transfers, "
                "--allocator-iterations, --no-wait; "
                "no command"
            )
        if steps is not None and iterations is not None:
            raise typer.BadParameter(
                "--steps are the next ones, --iterations are these: choose one of them"
            )
        seams.service("slices").attach_to(
            attach,
            iterations if steps is None else str(steps),
            poll,
            allocator_iterations,
            transfers,
            wait,
        )
        return 0
    if steps is not None:
        raise typer.BadParameter(
            "--steps is for --attach: choose what to record with --iterations FROM:TO"
        )
    if not command:
        raise typer.BadParameter(
            "name the command that starts the job after --", param_hint="CMD"
        )
    if on_demand and (iterations or transfers or allocator_iterations):
        raise typer.BadParameter(
            "--on-demand records phases alone: pass the other options to --attach"
        )
    first, last = parse_iterations(iterations) if iterations is not None else (0, None)
    options = Options(
        first=first,
        last=last,
        max_bytes=optional_size(max_size),
        poll_ms=poll,
        allocator_iterations=allocator_iterations,
        transfers=transfers,
        memory=record == "all" and not on_demand,
        on_demand=on_demand,
    )
    path = location(_fill_placeholders(output) if output else trace_name(command))
    service = metrics_server(metrics) if metrics is not None else None
    job = RecordedCommand(command, path, options, force, service)
    if watch:
        status: int = seams.service("profile-view")(job)
        return status
    return profile_in_terminal(job) if os.isatty(2) else profile_job(job)


def _fill_placeholders(output: str) -> str:
    """Replace the placeholders of an output path. Raises UserError for an unknown
    one."""
    from ebbtide.errors import UserError

    filled = output.replace("{host}", socket.gethostname())
    if unknown := _PLACEHOLDER.search(filled):
        raise UserError(
            f"unknown placeholder {unknown[0]} in -o {output}; known: {{host}}, the "
            "name of this host"
        )
    return filled


def trace_name(command: list[str]) -> str:
    """Return a default name for the trace: the name of the script and the time."""
    script = next(
        (Path(word).stem for word in command if word.endswith(".py")),
        Path(command[0]).name,
    )
    return f"{re.sub(r'[^A-Za-z0-9_.-]', '_', script)}-{time.strftime('%Y%m%d-%H%M%S')}.ebb"
