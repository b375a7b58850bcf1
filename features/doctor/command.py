"""`ebbtide doctor`: what makes a host slow, before a job runs on it."""

import json
import shlex
from dataclasses import asdict
from typing import Annotated

import typer

from ebbtide.cli.command import command
from ebbtide.cli.options import Json, Verbose
from ebbtide.cli.printing import echo, print_view


@command(
    "Run",
    0,
    runs_a_job=True,
    examples=("doctor", 'doctor --launch "torchrun --nproc-per-node 4 train.py"'),
)
def doctor(
    job: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- CMD...]", help="The job that is to run."),
    ] = None,
    launch: Annotated[
        str | None,
        typer.Option(
            metavar="CMD",
            help=(
                "Print the line that starts this command with its ranks bound to cores."
            ),
        ),
    ] = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure", help="Also measure copies and memory, a few seconds."
        ),
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="End with 1 where there is a warning.")
    ] = False,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Check this host: cores, threads, memory, links, storage and software, as a job
    would have them."""
    from ebbtide.features.doctor.check import (
        checks_of,
        diagnosis_view,
        examine,
        measured_checks,
    )
    from ebbtide.features.doctor.host import this_host
    from ebbtide.features.doctor.launch import launch_line

    if launch is not None:
        if job or not launch.strip():
            raise typer.BadParameter(
                'name the command once: --launch "torchrun --nproc-per-node 4 train.py"'
            )
        line = launch_line(this_host(shlex.split(launch)))
        echo(json.dumps({"launch": line}) if as_json else line)
        return
    host = this_host(job or [])
    checks = examine(host)
    if measure:
        checks += measured_checks(host)
    if as_json:
        echo(json.dumps({"checks": [asdict(check) for check in checks]}))
    else:
        print_view(diagnosis_view(checks, verbose))
    if strict and checks_of(checks, "warning"):
        raise typer.Exit(1)
