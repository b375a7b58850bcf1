"""`ebbtide diff`: compare two traces."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated

import typer

from ebbtide.cli.command import command
from ebbtide.cli.options import Json, Verbose
from ebbtide.cli.printing import echo, echo_line, print_view


@command("Explain", 3, examples=("diff before.ebb after.ebb", "diff before.ebb after.ebb --json"))
def diff(
    a: Annotated[Path, typer.Argument(metavar="A.ebb", help="First trace.")],
    b: Annotated[Path, typer.Argument(metavar="B.ebb", help="Second trace.")],
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Compare time, memory, link use and setup of two traces."""
    from ebbtide.analysis.diff import compare
    from ebbtide.analysis.tables.diff import diff_view
    from ebbtide.profiler.trace import open_trace

    result = compare(open_trace(a), open_trace(b))
    if as_json:
        echo(json.dumps(result.as_json()))
    else:
        print_view(diff_view(result, verbose))
        echo_line(f"next: ebbtide findings {shlex.quote(str(b))}")
