"""`ebbtide calibrate`: measure the rates of a machine."""

from __future__ import annotations

import contextlib
import json
import re
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ebbtide.cli.options import Force, Json
from ebbtide.cli.render.tables import table
from ebbtide.units import bytes_text, ms_text, rate_text

if TYPE_CHECKING:
    from ebbtide.machines.machine import Machine


def calibrate(
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="M.json", help="Machine file to write.", show_default="NAME.json"),
    ] = None,
    from_trace: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="RUN.ebb",
            help="Fit rates from this trace instead of measuring. Repeatable.",
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Name of the machine.", show_default="this host's name, or `fitted`"),
    ] = None,
    seconds: Annotated[
        float, typer.Option(metavar="S", help="Approximate duration of the measurement in s.", min=1, max=3600)
    ] = 40.0,
    ranks: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Processes that measure at once, like the ranks of a job that share this host.",
            min=1,
            max=64,
            show_default="1, or torchrun's",
        ),
    ] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Measure the rates that `replay` needs (memory, updates, copies), or fit them from traces of a machine."""
    if from_trace and ranks is not None:
        raise typer.BadParameter("--ranks is for measuring, and with --from-trace nothing is measured")
    called = name or ("fitted" if from_trace else socket.gethostname())
    path = output or Path(re.sub(r"[^A-Za-z0-9_.-]", "_", called) + ".json")
    machine = _fitted(from_trace, called, path, force) if from_trace else _measured(ranks, seconds, called, path, force)
    if machine is None:
        return
    if as_json:
        typer.echo(json.dumps(machine.as_json()))
    else:
        _print(machine)
    for note in machine.more.get("notes", ()):
        typer.echo(f"ebbtide: {note}", err=True)
    trace = from_trace[0] if from_trace else "RUN.ebb"
    if machine.h2d_bytes_per_s is None:
        where = "a preset (ebbtide replay --machine a100-40gb-published), or this command where a GPU is"
        typer.echo(
            f"ebbtide: machine: {path}; without a link's rates nothing can be replayed on it: use {where}", err=True
        )
        return
    typer.echo(f"ebbtide: machine: {path}; next: ebbtide replay {trace} --machine {path}", err=True)


def _fitted(traces: list[Path], name: str, path: Path, force: bool) -> Machine:
    from ebbtide.interleave.calibrate.fitting.from_traces import machine_of
    from ebbtide.output_files import new_output

    with new_output(path, force, Path.is_file, "a file") as file:
        machine = machine_of(traces, name)
        machine.save(file)
    return machine


def _measured(count: int | None, seconds: float, name: str, path: Path, force: bool) -> Machine | None:
    """The machine; None on all ranks but the first, which have nothing to say."""
    from ebbtide.interleave.calibrate.ranks import ranks_of
    from ebbtide.interleave.calibrate.run import calibrate as run
    from ebbtide.output_files import new_output

    with ranks_of(count, partial(run, seconds=seconds, name=name)) as ranks:
        if ranks.rank:
            run(ranks, seconds, name)
            return None
        with new_output(path, force, Path.is_file, "a file") as file, _progress() as began:
            machine = run(ranks, seconds, name, began)
            machine.save(file)
        return machine


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str, float], object]]:
    """A bar on stderr; none where that is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(
        *columns, console=console, transient=True, refresh_per_second=2, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda label, done: bar.update(task, description=label, completed=done)


_RATES: dict[str, tuple[str, Callable[[float | None], str]]] = {
    "gpu_memory_bytes": ("GPU memory", bytes_text),
    "host_memory_bytes": ("host memory", bytes_text),
    "host_memory_bytes_per_s": ("host memory, read and written", rate_text),
    "h2d_bytes_per_s": ("h2d, pinned", rate_text),
    "d2h_bytes_per_s": ("d2h, pinned", rate_text),
    "duplex_bytes_per_s": ("both ways at once, together", rate_text),
    "h2d_pageable_bytes_per_s": ("h2d, pageable", rate_text),
    "d2h_pageable_bytes_per_s": ("d2h, pageable", rate_text),
    "cpu_update_params_per_s": ("update on the CPU", lambda rate: _params_text(rate)),
    "cpu_cast_params_per_s": ("cast on the CPU", lambda rate: _params_text(rate)),
    "gpu_update_params_per_s": ("update on the GPU", lambda rate: _params_text(rate)),
    "step_overhead_s": ("overhead of a step", lambda s: ms_text(None if s is None else s * 1e3)),
}


def _print(machine: Machine) -> None:
    rows = []
    for key, (label, text) in _RATES.items():
        value = getattr(machine, key)
        rows.append([label, text(value), "not known" if value is None else _source(machine, key)])
    table(f"{machine.name}, of one rank", ["", "rate", "from"], rows)
    fit = machine.more.get("fit")
    if fit is not None:
        table(
            "How well it explains the traces",
            ["trace", "policy", "update, fitted over measured"],
            [[name, fit["policies"][name], f"{100 * residual:+.1f} %"] for name, residual in fit["residuals"].items()],
        )


def _source(machine: Machine, key: str) -> str:
    fit = machine.more.get("fit")
    if fit is None:
        return f"measured: {machine.more['measured'][key]['how']}"
    if key not in fit["uncertainty"]:
        return "told by the traces"
    factor = f"x{fit['uncertainty'][key]:.2f}"
    return f"belief, {factor}: these traces do not tell" if key in fit["unidentified"] else f"fitted, {factor}"


def _params_text(rate: float | None) -> str:
    return "-" if rate is None else f"{rate / 1e9:.3g} G parameters/s"
