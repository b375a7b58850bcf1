"""The command line."""

import os
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Annotated, Any, Literal

import typer

import ebbtide
from ebbtide.cli.command import extra_of, find_commands, without_alias
from ebbtide.cli.help import AllCommands, OneCommand
from ebbtide.cli.printing import (
    echo,
    echo_error,
    output_width,
    own_stdout,
    prints_to_terminal,
)
from ebbtide.urls import with_urls

# Least width of a help whose options have frames around them.
_PANEL_WIDTH = 100


def make_app(command: str | None = None) -> typer.Typer:
    """Make the app with one command, or with all of them where `command` is None or
    names none."""
    # Panels with frames need space.
    markup: Literal["rich"] | None = (
        "rich" if prints_to_terminal() and output_width() >= _PANEL_WIDTH else None
    )
    app = typer.Typer(
        name="ebbtide",
        cls=AllCommands,
        rich_markup_mode=markup,
        invoke_without_command=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        help=(
            "Profile GPU memory and the PCIe link during training, and plan the "
            "offload of optimizer state."
        ),
    )
    app.callback()(_options)
    for entry in find_commands(command):
        run_command = entry.run if entry.shares_stdout else own_stdout()(entry.run)
        settings = {"allow_interspersed_args": False} if entry.runs_a_job else {}
        lines = "\n".join(f"  ebbtide {example}" for example in entry.examples)
        examples = f"\b\nExamples:\n{lines}" if lines else None
        register = app.command(
            entry.name, cls=OneCommand, context_settings=settings, epilog=examples
        )
        register(_taking_urls(run_command))
    return app


def _taking_urls(run_command: Callable[..., Any]) -> Callable[..., Any]:
    """Return a command whose paths may be URLs."""

    @wraps(run_command)
    def run_with_urls(**arguments: Any) -> Any:
        return run_command(
            **{name: with_urls(value) for name, value in arguments.items()}
        )

    return run_with_urls


def _print_version(requested: bool) -> None:
    if requested:
        echo(f"ebbtide {ebbtide.__version__}")
        raise typer.Exit


def _options(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Print the version.",
            is_eager=True,
            callback=_print_version,
        ),
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        echo(context.get_help())


def run(arguments: Sequence[str]) -> int:
    """Run a command line. Returns its exit status."""
    command = None
    try:
        words = without_alias(arguments)
        command = next((word for word in words if not word.startswith("-")), None)
        status = make_app(command)(words, prog_name="ebbtide", standalone_mode=False)
        return status if isinstance(status, int) else 0
    except typer.TyperException as error:
        # typer passes the message of pydantic on, with the kind of its error.
        return _fail(error.format_message().replace("Value error, ", ""))
    except (typer.Abort, KeyboardInterrupt):
        return 130
    except BrokenPipeError:
        # The reader of the output (a pager, head) has ended: Python must not try to
        # flush the rest.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        from ebbtide.errors import UserError
        from ebbtide.extras import EXTRAS, missing_text

        if isinstance(error, UserError):
            return _fail(str(error))
        if isinstance(error, ModuleNotFoundError) and error.name in EXTRAS:
            return _fail(missing_text(error.name, extra_of(command)))
        raise


def _fail(message: str) -> int:
    echo_error(" ".join(message.split()))
    return 2
