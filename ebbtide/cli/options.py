"""Options that several commands have, and the parsers of their values."""

from __future__ import annotations

import re
from collections.abc import Collection
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any

import typer

from ebbtide import seams
from ebbtide.machines.machine import MAX_RANKS
from ebbtide.units import parse_bytes


def size(text: str) -> int:
    """Parse `500MB`, `2GiB` or `1e9` as bytes. Raises BadParameter for anything
    else."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def optional_size(text: str | None) -> int | None:
    """Parse a size as `size` does, None as it is."""
    return None if text is None else size(text)


# The heading of options that few need: a help has options with a heading only where all
# are asked for.
RARE = "More options"
# Letters after a count: thousands, millions, billions (B or G) and trillions.
_SCALES = {"K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}


_MOST = 10**30


def count(text: str) -> int:
    """Parse `12`, `5e8` or `13B`. Raises BadParameter for anything but a whole number
    from 0."""
    # Defaults are numbers already.
    text = str(text)
    stem, scale = (
        (text[:-1], _SCALES[text[-1].upper()])
        if text[-1:].upper() in _SCALES
        else (text, 1)
    )
    try:
        # Not in floating point, in which 32.8e9 is no whole number.
        value = Decimal(stem) * scale
        number = round(value) if value < _MOST else -1
    except (ArithmeticError, ValueError):
        value, number = Decimal(0), -1
    if value != number or number < 0:
        raise typer.BadParameter(
            f"{text!r} is not a count: write a whole number, like 12, 5e8 or 13B"
        )
    return number


def iterations(text: str) -> tuple[int, int | None]:
    """Parse `3:6` (3, 4 and 5), `3:`, `:6` or `3` as (first, end). Raises BadParameter
    for anything else."""
    match = re.fullmatch(r"(\d*)(:?)(\d*)", text.strip())
    if match is None or text.strip() in ("", ":"):
        raise typer.BadParameter(
            f"{text!r} is not a range of iterations: write it like 3:6, 3: or :6"
        )
    start, colon, end = match.groups()
    first = int(start or 0)
    last = first + 1 if not colon else int(end) if end else None
    if last is not None and last <= first:
        raise typer.BadParameter(
            f"{text!r} is an empty range: the second number is its end, which is not "
            "included"
        )
    return first, last


def machine_in_host(machine: str | None, host: str | None) -> str | None:
    """Return the name of a machine whose GPU is in another host. Raises BadParameter
    for a host without a machine."""
    if host is not None and machine is None:
        raise typer.BadParameter(
            "--host is another host for the GPU of a machine: name the machine, too"
        )
    return machine if host is None else f"{machine}@{host}"


def metrics_server(text: str) -> Any:
    """Listen on `9400` or `HOST:9400` for scrapes. Raises BadParameter for anything
    else, UserError if it cannot."""
    serve = seams.service("metrics-server")
    try:
        server: Any = serve(text)
        return server
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def refuse_options(
    context: typer.Context, allowed: Collection[str], reason: str
) -> None:
    """Raise BadParameter if an option was given that is not allowed.

    Its name is not among the allowed ones: `--option REASON`.
    """
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if (
            parameter.name not in allowed
            and source is not None
            and source.name == "COMMANDLINE"
        ):
            raise typer.BadParameter(f"{parameter.opts[-1]} {reason}")


def valued(metavar: str, text: str, default: str | bool = True, **settings: Any) -> Any:
    """Return an option with the name of its value, its help, and its default where it
    is said in words."""
    return typer.Option(metavar=metavar, help=text, show_default=default, **settings)


def output_option(metavar: str, default: str | bool = True) -> Any:
    """Return the option for the file or folder that a command is to write.

    `metavar` is for its kind.
    """
    return typer.Option(
        "-o",
        "--output",
        metavar=metavar,
        help="File or folder to write.",
        show_default=default,
    )


def machine_option(default: str) -> Any:
    return valued(
        "M",
        "Machine file, or name of a preset (ebbtide machines); M@SPEC is its GPU in "
        "another host.",
        default,
    )


def memory_budget_option(default: str) -> Any:
    return valued(
        "SIZE", "Device memory for optimizer state in bytes, e.g. 2GiB.", default
    )


EMULATE_LINK = valued(
    "RATE",
    "Emulate the device; rate of its link in bytes/s per direction, e.g. 2GB.",
    "1GB where there is no GPU",
)


def jobs_option(default: str) -> Any:
    return valued("N", "Number of processes.", default, parser=count)


def rank_option(default: str) -> Any:
    return valued("N", "Rank to show.", default, parser=count)


def policy_option(default: str) -> Any:
    return valued("P", "Offload policy, e.g. twin-flow:0.4. Repeatable.", default)


TraceFile = Annotated[Path, typer.Argument(metavar="RUN.ebb", help="Trace to read.")]
Rank = Annotated[int | None, rank_option("the first one; all with --json")]
Iterations = Annotated[
    str | None,
    valued("FROM:TO", "Only these iterations, e.g. 3:6 for 3, 4 and 5.", "all"),
]
STEPS = valued(
    "N", "Number of iterations, which end with a step of the optimizer.", parser=count
)
# Their number, as `--iterations N`, from before the option had one meaning.
FormerSteps = Annotated[
    int | None, typer.Option("--iterations", parser=count, hidden=True)
]
MinBytes = Annotated[
    str, valued("SIZE", "Minimum free memory of a window in bytes, e.g. 500MB or 2GiB.")
]
Host = Annotated[
    str | None,
    valued(
        "SPEC",
        "Another host for the machine's GPU, e.g. ddr5-2ch,16-cores,pcie4x16,256GB; "
        "the same as --machine M@SPEC.",
        "that of the machine",
    ),
]
PolicyFile = Annotated[
    Path | None,
    valued(
        "FILE.py",
        "Python file that registers your own policies; it is executed.",
        rich_help_panel=RARE,
    ),
]
WORKLOAD = valued("W.json", "Workload file, instead of a trace.")
Params = Annotated[
    int | None,
    valued(
        "N", "Number of parameters, instead of a trace, e.g. 13e9 or 13B.", parser=count
    ),
]
RanksPerHost = Annotated[
    int | None,
    valued(
        "N",
        "Number of ranks that share a host, whose CPU and memory they divide "
        "(machines with a `box`).",
        "those of the trace, else all, up to those of the box",
        min=1,
        max=MAX_RANKS,
    ),
]
Plot = Annotated[
    Path | None, valued("FILE", "Also write a picture to this .png, .svg or .pdf file.")
]
Save = Annotated[
    Path | None,
    valued("FOLDER", "Also write the traces of each policy into this folder."),
]
Metrics = Annotated[
    str | None,
    valued(
        "[HOST:]PORT",
        "Serve figures for Prometheus on this port of 127.0.0.1 or HOST; 0 for a free "
        "port.",
        "not served",
    ),
]
Jobs = Annotated[
    int | None, jobs_option("one per core for a large trace, else none beside this one")
]
Scheduler = Annotated[
    str | None,
    valued(
        "ADDRESS",
        "Address of the scheduler of a Dask cluster to run on.",
        "this machine",
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Replace existing output.")]
Verbose = Annotated[
    bool,
    typer.Option("-v", "--verbose", help="Print all that is known, in more lines."),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object instead of tables.")
]
