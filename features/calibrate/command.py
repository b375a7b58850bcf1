"""`ebbtide calibrate`: measure the rates of a machine."""

from __future__ import annotations

import json
import re
import socket
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ebbtide.cli.command import command
from ebbtide.cli.options import Force, Json, Verbose, output_option, valued
from ebbtide.cli.printing import echo, echo_line, on_stderr, print_view
from ebbtide.machines.accuracy import accuracy_of

if TYPE_CHECKING:
    from ebbtide.machines.machine import Machine


@command(
    "Predict",
    2,
    examples=(
        "calibrate -o machine.json",
        "calibrate --from-trace run.ebb -o machine.json",
    ),
    extra="calibrate",
)
def calibrate(
    output: Annotated[Path | None, output_option("M.json", "NAME.json")] = None,
    from_trace: Annotated[
        list[Path] | None,
        valued(
            "RUN.ebb",
            "Fit rates from this trace instead of measuring. Repeatable: traces of "
            "several models tell the "
            "overhead of a step from rates, and of several numbers of ranks on a host "
            "how the ranks share it.",
        ),
    ] = None,
    name: Annotated[
        str | None,
        valued("NAME", "Name of the machine.", "this host's name, or `fitted`"),
    ] = None,
    seconds: Annotated[
        float,
        valued("S", "Approximate duration of the measurement in s.", min=1, max=3600),
    ] = 40.0,
    ranks: Annotated[
        int | None,
        valued(
            "N",
            "Number of processes that measure at the same time, as the ranks of a job "
            "do on this host; their "
            "totals are written as `box`.",
            "1, or the ranks of torchrun",
            min=1,
            max=64,
        ),
    ] = None,
    storage: Annotated[
        list[Path] | None,
        valued(
            "FOLDER",
            "Also measure reads and writes of this folder, for state that host memory "
            "does not hold. Writes files "
            "of up to 2.4 GB there, which are removed. Repeatable.",
        ),
    ] = None,
    force: Force = False,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Measure the rates that `replay` needs (memory, updates, copies), or fit them from
    traces of the machine.

    All rates are of one rank while all ranks of its host update and no copies run."""
    for option, value in (("--ranks", ranks), ("--storage", storage)):
        if from_trace and value:
            raise typer.BadParameter(
                f"{option} is for measuring; with --from-trace nothing is measured"
            )
    machine_name = name or ("fitted" if from_trace else socket.gethostname())
    path = output or Path(re.sub(r"[^A-Za-z0-9_.-]", "_", machine_name) + ".json")
    if from_trace:
        machine: Machine | None = _fit(from_trace, machine_name, path, force)
    else:
        machine = _measure(ranks, seconds, machine_name, path, force, storage or [])
    if machine is None:
        return
    from ebbtide.features.calibrate.tables import machine_view

    if as_json:
        echo(json.dumps(machine.as_json()))
    else:
        print_view(machine_view(machine, verbose))
    with on_stderr():
        accuracy = accuracy_of(machine)
        for note in (accuracy.text(), *machine.extra.get("notes", ())):
            echo_line(f"ebbtide: {note}")
        if accuracy.undetermined:
            echo_line(
                "ebbtide: not determined by the runs: "
                f"{', '.join(accuracy.undetermined)}"
            )
        if machine.h2d_bytes_per_s is None:
            echo_line(
                f"ebbtide: {path} has no link rates, which replay needs: use a preset "
                "(--machine a100-40gb-published), "
                "or calibrate on a machine with a GPU"
            )
        else:
            trace = from_trace[0] if from_trace else "RUN.ebb"
            echo_line(f"ebbtide: machine: {path}")
            echo_line(f"next: ebbtide replay {trace} --machine {path}")


def _fit(traces: list[Path], name: str, path: Path, force: bool) -> Machine:
    from ebbtide.features.calibrate.fitting.from_traces import machine_of
    from ebbtide.output_files import new_output

    with new_output(path, force, Path.is_file, "a file") as file:
        machine = machine_of(traces, name)
        machine.save(file)
    return machine


def _measure(
    count: int | None,
    seconds: float,
    name: str,
    path: Path,
    force: bool,
    storage: list[Path],
) -> Machine | None:
    """Measure together with all other ranks.

    Return the machine, or None on all ranks but the first.
    """
    from ebbtide.cli.printing import progress_bar
    from ebbtide.features.calibrate.ranks import join_ranks
    from ebbtide.features.calibrate.run import calibrate as run
    from ebbtide.output_files import new_output

    with join_ranks(
        count, partial(run, seconds=seconds, name=name, storage=storage)
    ) as ranks:
        if ranks.rank:
            run(ranks, seconds, name, storage=storage)
            return None
        with (
            new_output(path, force, Path.is_file, "a file") as file,
            progress_bar() as update,
        ):
            machine = run(
                ranks,
                seconds,
                name,
                lambda part, done: update(part, done, 1.0),
                storage,
            )
            machine.save(file)
        return machine
