"""The command line: one file per command. A command is imported when it runs, so that commands start fast."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated

import typer

import ebbtide
from ebbtide.cli.printing import echo, own_stdout

# Heading in the help -> its commands.
COMMANDS = {
    "Record": ("profile", "watch", "import", "merge"),
    "Explain": (
        "summary",
        "findings",
        "activity",
        "windows",
        "memory",
        "link",
        "steps",
        "iterations",
        "diff",
        "plot",
        "report",
    ),
    "Predict": ("dry-run", "plan", "calibrate", "replay", "sweep"),
    "Run": ("compare",),
    "Files": ("export", "tables"),
}
# Commands whose standard output is a job's own, or the terminal of a view.
_SHARED_STDOUT = ("profile", "dry-run", "watch")
# A command is the function of its name in the module of its name, except these: (module, function).
_ELSEWHERE = {"import": ("import_", "import_"), "dry-run": ("dry_run", "dry_run")}


def make_app(command: str | None = None) -> typer.Typer:
    """Make the app with one command, or with all of them where `command` is None or names none."""
    app = typer.Typer(
        name="ebbtide",
        invoke_without_command=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        help="Profile GPU memory and the PCIe link during training, and plan the offload of optimizer state.",
    )
    app.callback()(_options)
    only_one = any(command in names for names in COMMANDS.values())
    for heading, names in COMMANDS.items():
        for name in names:
            if name == command or not only_one:
                module, function = _ELSEWHERE.get(name, (name, name))
                run_command = getattr(import_module(f"ebbtide.cli.{module}"), function)
                if name not in _SHARED_STDOUT:
                    run_command = own_stdout()(run_command)
                # All words after the first one that is not an option belong to the recorded job.
                settings = {"allow_interspersed_args": False} if name in ("profile", "dry-run") else {}
                app.command(name, rich_help_panel=heading, context_settings=settings)(run_command)
    return app


def _print_version(requested: bool) -> None:
    if requested:
        echo(f"ebbtide {ebbtide.__version__}")
        raise typer.Exit


def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        echo(context.get_help())


def run(arguments: Sequence[str]) -> int:
    """Run a command line. Returns its exit status."""
    try:
        command = next((word for word in arguments if not word.startswith("-")), None)
        status = make_app(command)(list(arguments), prog_name="ebbtide", standalone_mode=False)
        return status if isinstance(status, int) else 0
    except typer.TyperException as error:
        return _fail(error.format_message())
    except (typer.Abort, KeyboardInterrupt):
        return 130
    except BrokenPipeError:
        # The reader of the output (a pager, head) has ended: Python must not try to flush the rest.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        from ebbtide.errors import UserError

        if isinstance(error, UserError):
            return _fail(str(error))
        raise


def _fail(message: str) -> int:
    typer.echo(f"ebbtide: {' '.join(message.split())}", err=True)
    return 2
