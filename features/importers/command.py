"""`ebbtide import`: convert files of other tools into a trace, or merge traces."""

import re
from pathlib import Path
from typing import Annotated, Literal

import typer

from ebbtide.cli.command import command
from ebbtide.cli.options import (
    Force,
    Scheduler,
    jobs_option,
    output_option,
    refuse_options,
    size,
    valued,
)
from ebbtide.cli.reading import check_options
from ebbtide.phases import ITERATION_PARTS
from ebbtide.terminal_lines import print_note

_RANGE_MEANINGS = (*ITERATION_PARTS, "iteration")


@command(
    "Record",
    2,
    examples=(
        "import torch-profiler.json.gz -o run.ebb",
        "import log.txt monitor.csv -o run.ebb",
    ),
)
def import_(
    context: typer.Context,
    sources: Annotated[
        list[Path],
        typer.Argument(
            metavar="SOURCE...",
            help=(
                "Files of one run, or their folder: logs of DeepSpeed or Megatron-LM, "
                "torch.profiler traces, memory "
                "snapshots, Nsight Systems exports, output of nvidia-smi, DCGM or "
                "other "
                "GPU monitors. Or traces of one "
                "job, one per host."
            ),
        ),
    ],
    output: Annotated[Path, output_option("RUN.ebb")],
    format: Annotated[
        str | None,
        typer.Option(
            metavar="F",
            help=(
                "Format: deepspeed-log, kineto, megatron-log, nsys, nvml-monitor, "
                "torch-snapshot."
            ),
            show_default="recognised by content",
        ),
    ] = None,
    capacity: Annotated[
        str | None,
        valued(
            "SIZE", "Memory of the GPU in bytes, e.g. 80GB.", "as stated by the files"
        ),
    ] = None,
    link: Annotated[
        str | None,
        valued(
            "GENxLANES",
            "PCIe link of the GPU, e.g. 5x16, for its peak rate.",
            "as stated by the files",
        ),
    ] = None,
    align: Annotated[
        str | None,
        typer.Option(
            metavar="start|FILE",
            help=(
                "Move files or traces without a common clock so that all begin with "
                "the first one (start) or with "
                "FILE."
            ),
            show_default="use their times, which must overlap",
        ),
    ] = None,
    phase: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=PHASE",
            help=(
                "NVTX ranges of Nsight Systems called NAME are forward, backward, "
                "update, iteration, or other (none "
                "of these); * in NAME stands for any text. Repeatable."
            ),
            show_default="by the words in their names",
        ),
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(
            metavar="N|all",
            help=(
                "Run of a log to which several were appended: its number from 1, or "
                "all of them one after another."
            ),
            show_default="the last complete one",
        ),
    ] = None,
    jobs: Annotated[int | None, jobs_option("one")] = None,
    scheduler: Scheduler = None,
    force: Force = False,
) -> None:
    """Convert files of other tools into a trace, or merge the traces that the hosts of
    one job recorded.

    Give all files of a run together, e.g. a log and its monitor CSV."""
    from ebbtide.profiler.trace.files import is_trace
    from ebbtide.profiler.trace.trace import closing_lines

    if all(map(is_trace, sources)):
        merges = {"sources", "output", "align", "force"}
        refuse_options(
            context,
            merges,
            "is for files of other tools: traces are merged as they are",
        )
        from ebbtide.profiler.trace import open_trace
        from ebbtide.profiler.trace.merge import merge

        for line in closing_lines(
            merge([open_trace(path) for path in sources], output, force, align)
        ):
            print_note(line)
        return
    capacity_bytes = size(capacity) if capacity is not None else None
    lanes = _link(link) if link is not None else None
    phases = dict(map(_phase, phase or []))
    check_options(jobs, scheduler)

    from ebbtide.features.importers.importer import Hardware
    from ebbtide.features.importers.load import import_trace

    trace = import_trace(
        sources,
        output,
        format,
        force,
        Hardware(capacity_bytes, lanes),
        align,
        phases,
        jobs or 1,
        _run(run) if run is not None else None,
        scheduler,
    )
    for line in (*trace.notes, *closing_lines(trace)):
        print_note(line)


def _link(text: str) -> tuple[int, int]:
    match = re.fullmatch(
        r"\s*(?:gen)?\s*([1-6])\s*x\s*(1|2|4|8|16|32)\s*", text, re.IGNORECASE
    )
    if match is None:
        raise typer.BadParameter(
            f"{text!r} is not a link: write generation x lanes, e.g. 5x16"
        )
    generation, width = match.groups()
    return int(generation), int(width)


def _run(text: str) -> int | Literal["all"]:
    if text == "all":
        return "all"
    if re.fullmatch(r"[1-9]\d{0,8}", text) is None:
        raise typer.BadParameter(f"{text!r} is no run: write its number, or all")
    return int(text)


def _phase(text: str) -> tuple[str, str]:
    name, _, meaning = text.rpartition("=")
    if not name or meaning not in _RANGE_MEANINGS:
        raise typer.BadParameter(
            f"{text!r} assigns no phase: write NAME={'|'.join(_RANGE_MEANINGS)}"
        )
    return name, meaning
