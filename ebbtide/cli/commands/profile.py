"""`ebbtide profile`: record a training job."""

from __future__ import annotations

import re
import shlex
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

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
    output_option,
    size,
    valued,
)
from ebbtide.cli.options import iterations as parse_iterations
from ebbtide.cli.printing import echo, progress_bar
from ebbtide.terminal_lines import print_note

if TYPE_CHECKING:
    from ebbtide.profiler.recording.attach import AttachedSlice

_PLACEHOLDER = re.compile(r"\{[^{}]*\}")
# Between looks at the progress of a slice.
_PERIOD_S = 0.1


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
    output, signals and exit status. The trace is finished when it has ended. With
    --watch it is a child of this command. In its name {host} is the name of this
    host."""
    from ebbtide.profiler.agent.options import Options
    from ebbtide.profiler.recording.collector import RecordedCommand
    from ebbtide.profiler.recording.launch import profile as profile_job

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
        attach_to(
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
        max_bytes=size(max_size) if max_size is not None else None,
        poll_ms=poll,
        allocator_iterations=allocator_iterations,
        transfers=transfers,
        memory=record == "all" and not on_demand,
        on_demand=on_demand,
    )
    path = Path(_fill_placeholders(output) if output else trace_name(command))
    service = metrics_server(metrics) if metrics is not None else None
    job = RecordedCommand(command, path, options, force, service)
    if watch:
        status: int = seams.service("profile-view")(job)
        return status
    return profile_job(job)


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


def attach_to(
    path: Path,
    iterations: str | None,
    poll_ms: float,
    allocator_iterations: int,
    transfers: bool,
    wait: bool,
) -> None:
    """Ask a running job for a detailed slice of some iterations (a number, or
    `FROM:TO`), and wait for its end."""
    from ebbtide.profiler.recording.attach import attach

    first, number = _slice_range(iterations)
    attached = attach(path, number, first, poll_ms, allocator_iterations, transfers)
    if wait:
        _wait_for_slice(attached)
        _print_slice(attached)
    else:
        echo(
            "iterations "
            f"{_iterations_text(attached.request.first, attached.request.end)} will "
            "have details"
        )


def _slice_range(text: str | None) -> tuple[int | None, int]:
    """Parse `20` as (None, 20) and `500:520` as (500, 20)."""
    if text is None:
        raise typer.BadParameter(
            "--attach needs --steps, the number of iterations, or --iterations FROM:TO"
        )
    if ":" not in text:
        return None, count(text)
    first, end = parse_iterations(text)
    if end is None:
        raise typer.BadParameter(
            f"--iterations {text}: a slice needs an end, as in 500:520"
        )
    return first, end - first


def _wait_for_slice(attached: AttachedSlice) -> None:
    """Wait for the end of a slice, with a bar that shows how far it is."""
    first, end, ranks = (
        attached.request.first,
        attached.request.end,
        len(attached.processes),
    )
    on = f" on {ranks} ranks" if ranks > 1 else ""
    try:
        with progress_bar() as update:
            while not attached.update():
                reached = (
                    min(process.iteration or 0 for process in attached.processes) + 1
                )
                until = (
                    f"details begin at {first}"
                    if reached < first
                    else f"details until {end - 1}"
                )
                update(
                    f"iteration {reached}: {until}{on}",
                    min(max(reached, first), end) - first,
                    end - first,
                )
                time.sleep(_PERIOD_S)
    except KeyboardInterrupt:
        print_note(
            "no longer waiting; the job records iterations "
            f"{_iterations_text(first, end)} all the same"
        )
        raise


def _print_slice(attached: AttachedSlice) -> None:
    """Print the iterations that have details, and which ranks have others. Raise
    TraceError if none has any."""
    from ebbtide.errors import TraceError

    recorded = {process: attached.recorded(process) for process in attached.processes}
    spans = [span for span in recorded.values() if span is not None]
    if not spans:
        raise TraceError(
            "no details were recorded: the job ended, or was past iteration "
            f"{attached.request.end - 1}"
        )
    common = max(first for first, _ in spans), min(end for _, end in spans)
    if common[0] < common[1]:
        path = shlex.quote(str(attached.path))
        echo(
            f"details: iterations {_iterations_text(*common)}   in {path}: "
            f"--iterations {common[0]}:{common[1]}"
        )
    for process, span in recorded.items():
        if span is None:
            echo(
                f"rank {process.rank}: no details, since it was past the slice or has "
                "ended"
            )
        elif span != common:
            echo(f"rank {process.rank}: iterations {_iterations_text(*span)}")
    if common[1] < attached.request.end:
        echo(
            "the slice ended early: it was to last until iteration "
            f"{attached.request.end - 1}"
        )


def _iterations_text(first: int, end: int) -> str:
    return str(first) if end == first + 1 else f"{first} to {end - 1}"
