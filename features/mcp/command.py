"""`ebbtide mcp`: a server of the Model Context Protocol, for assistants."""

from pathlib import Path
from typing import Annotated

import typer

from ebbtide.cli.command import command
from ebbtide.errors import UserError
from ebbtide.extras import missing_text


@command("Explain", shares_stdout=True, examples=("mcp", "mcp --folder runs"))
def mcp(
    folder: Annotated[
        Path,
        typer.Option(
            metavar="FOLDER",
            help="Folder that paths of traces and jobs are relative to.",
        ),
    ] = Path(),
) -> None:
    """Serve summary, findings, windows, replay, plan and dry-run to an assistant, on
    standard input and output.

    Needs the package mcp: pip install 'ebbtide[mcp]'. Each answer is the screen of a
    command, under 2,000 tokens."""
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder")
    try:
        from ebbtide.features.mcp.tools import make_server
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("mcp"):
            raise
        raise UserError(missing_text("mcp")) from None
    make_server(folder).run()
