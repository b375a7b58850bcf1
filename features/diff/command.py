"""`ebbtide diff`: compare two runs."""

import json
import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer

from ebbtide.cli.command import command
from ebbtide.cli.options import Json, Verbose
from ebbtide.cli.printing import echo, echo_line, print_view


@command(
    "Explain",
    3,
    examples=(
        "diff before.ebb after.ebb",
        "diff base.json new.ebb --fail-if 'iteration>5%'",
    ),
)
def diff(
    a: Annotated[
        Path,
        typer.Argument(metavar="A.ebb", help="First trace, or file of summary --json."),
    ],
    b: Annotated[
        Path,
        typer.Argument(
            metavar="B.ebb", help="Second trace, or file of summary --json."
        ),
    ],
    fail_if: Annotated[
        list[str] | None,
        typer.Option(
            "--fail-if",
            metavar="QUANTITY>SHARE%",
            help=(
                "Exit with 1 if a quantity grew by more, e.g. 'iteration>5%' or "
                "'peak_allocated>1%'. Repeatable. "
                "Times (of which the least growth with 95 % confidence counts): "
                "iteration, "
                "forward, backward, update, "
                "other. Sizes: peak_allocated, peak_reserved, peak_device, peak_POOL "
                "of "
                "any other pool, h2d_bytes, "
                "d2h_bytes."
            ),
            show_default="no limits",
        ),
    ] = None,
    by: Annotated[
        Literal["kernel", "operator"] | None,
        typer.Option(
            "--by",
            help=(
                "Compare the time of each kernel, or of the kernels that each "
                "operator launched."
            ),
        ),
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print Markdown, for a comment.")
    ] = False,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Compare time, memory, link use and setup of two runs, and fail if the second one
    is above limits.

    Traces, also of dry runs, and stored files of `summary --json` can be compared."""
    from ebbtide.features.diff.comparison import compare
    from ebbtide.features.diff.gate import Limit, results
    from ebbtide.features.diff.runs import open_run
    from ebbtide.features.diff.tables import diff_view

    try:
        limits = [Limit.parse(text) for text in fail_if or ()]
    except ValueError as error:
        raise typer.BadParameter(f"--fail-if {error}") from None
    result = compare(open_run(a), open_run(b))
    checked = results(result, limits)
    if as_json:
        failures = [entry.as_json() for entry in checked if entry.fails]
        echo(json.dumps({**result.as_json(), "failures": failures if limits else None}))
    elif markdown:
        from ebbtide.analysis.tables.text import markdown_lines

        for line in markdown_lines(diff_view(result, results=checked, by=by)):
            echo(line)
    else:
        print_view(diff_view(result, verbose, checked, by))
        if b.is_dir():
            echo_line(f"next: ebbtide findings {shlex.quote(str(b))}")
    if any(entry.fails for entry in checked):
        raise typer.Exit(1)
