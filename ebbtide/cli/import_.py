"""`ebbtide import`: a trace from what other tools recorded."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from ebbtide.cli.options import size


def import_(
    sources: Annotated[
        list[Path],
        typer.Argument(
            metavar="SOURCE...",
            help="The files of one run: DeepSpeed logs, NVML monitor CSVs, torch.profiler traces, memory snapshots.",
        ),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="The trace to write.")],
    format: Annotated[
        str | None, typer.Option(help="The format of the files.", show_default="recognised by content")
    ] = None,
    capacity: Annotated[
        str | None, typer.Option(help="The memory of a device, e.g. 80GB, where the files do not tell it.")
    ] = None,
    link: Annotated[
        str | None, typer.Option(help="The device's PCIe link as GENERATIONxLANES, e.g. 5x16; it gives the peak.")
    ] = None,
    force: Annotated[bool, typer.Option(help="Replace a trace that stands at the output path.")] = False,
) -> None:
    """Make a trace of what another tool recorded. Files that share a clock go together: a log and its monitor CSV."""
    capacity_bytes = size(capacity) if capacity is not None else None
    lanes = _link(link) if link is not None else None

    from ebbtide.profiler.importers.load import Hardware, import_trace
    from ebbtide.profiler.launch import next_commands

    trace = import_trace(sources, output, format, force, Hardware(capacity_bytes, lanes))
    for note in trace.notes:
        typer.echo(f"ebbtide: {note}", err=True)
    typer.echo(f"ebbtide: {next_commands(trace)}", err=True)


def _link(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"\s*(?:gen)?\s*([1-6])\s*x\s*(1|2|4|8|16|32)\s*", text, re.IGNORECASE)
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a link: write generation x lanes, like 5x16")
    generation, width = match.groups()
    return int(generation), int(width)
