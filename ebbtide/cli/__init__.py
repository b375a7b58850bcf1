"""The commands, a file each. What a command needs it imports when it runs: `--help` stays quick."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

import ebbtide
from ebbtide.cli import (
    calibrate,
    compare,
    diff,
    export,
    findings,
    frames,
    import_,
    iterations,
    link,
    memory,
    merge,
    plot,
    profile,
    replay,
    report,
    steps,
    summary,
    sweep,
    windows,
)

app = typer.Typer(
    name="ebbtide",
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Where device memory and the PCIe link go while a model trains, phase by phase.",
)
app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False})(profile.profile)
app.command()(summary.summary)
app.command()(findings.findings)
app.command()(windows.windows)
app.command()(memory.memory)
app.command()(link.link)
app.command()(steps.steps)
app.command()(iterations.iterations)
app.command()(plot.plot)
app.command()(report.report)
app.command()(diff.diff)
app.command()(export.export)
app.command()(frames.tables)
app.command()(calibrate.calibrate)
app.command()(replay.replay)
app.command()(sweep.sweep)
app.command()(compare.compare)
app.command()(merge.merge)
app.command("import")(import_.import_)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"ebbtide {ebbtide.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_version)
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def run(arguments: Sequence[str]) -> int:
    """Run a command line and return its exit status."""
    try:
        status = app(list(arguments), prog_name="ebbtide", standalone_mode=False)
        return status if isinstance(status, int) else 0
    except typer.TyperException as error:
        return _fail(error.format_message())
    except (typer.Abort, KeyboardInterrupt):
        return 130
    except BrokenPipeError:
        # The reader of our output (a pager, head) has gone; Python must not try to flush what is left.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        from ebbtide.profiler.trace.errors import UserError

        if isinstance(error, UserError):
            return _fail(str(error))
        raise


def _fail(message: str) -> int:
    typer.echo(f"ebbtide: {' '.join(message.split())}", err=True)
    return 2
