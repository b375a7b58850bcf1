"""`ebbtide diff`: compare two traces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ebbtide.cli.options import Json
from ebbtide.cli.printing import echo


def diff(
    a: Annotated[Path, typer.Argument(metavar="A.ebb", help="First trace.")],
    b: Annotated[Path, typer.Argument(metavar="B.ebb", help="Second trace.")],
    as_json: Json = False,
) -> None:
    """Compare time, memory, link use and setup of two traces."""
    from ebbtide.analysis.diff import compare
    from ebbtide.cli.render.diff import print_diff
    from ebbtide.profiler.trace import open_trace

    result = compare(open_trace(a), open_trace(b))
    if as_json:
        echo(json.dumps(result.as_json()))
    else:
        print_diff(result)
