"""The help of the command line, of all commands and of one, whose rarer options
`--help-all` shows."""

import re
from collections.abc import Callable
from typing import Annotated, Any

import typer
import typer.core
import typer.main

from ebbtide.cli.command import HEADINGS, Command, find_commands
from ebbtide.cli.printing import echo


class AllCommands(typer.core.TyperGroup):
    """The help of all commands: first those to begin with, the others by heading.

    Each of the former has a line.
    """

    def format_help(self, ctx: Any, formatter: Any) -> None:
        first, *others = HEADINGS
        commands = find_commands(None)
        formatter.write_usage(ctx.command_path, "COMMAND ...")
        formatter.write_paragraph()
        formatter.write_text(self.help or "")
        with formatter.section("Commands"):
            formatter.write_dl(
                [(c.name, first_sentence(c)) for c in commands if c.heading == first]
            )
        with formatter.section("More commands"):
            names = {
                heading: ", ".join(c.name for c in commands if c.heading == heading)
                for heading in others
            }
            formatter.write_dl(
                [(heading.lower(), text) for heading, text in names.items()]
            )
        with formatter.section("Help"):
            formatter.write_text(
                "ebbtide COMMAND --help has the options and examples; ebbtide "
                "--version the version."
            )


def first_sentence(entry: Command) -> str:
    """Return the first sentence of what a command does."""
    text = " ".join((entry.run.__doc__ or "").split())
    return re.split(r"(?<=[.?]) ", text)[0]


class OneCommand(typer.core.TyperCommand):
    """A command whose help leaves out options with a heading of their own unless all
    options are asked for."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._rare = [option for option in self.params if _is_rare(option)]
        for option in self._rare:
            option.hidden = True  # type: ignore[attr-defined]
        if self._rare:
            self.params.append(_help_all(len(self._rare), self._print_all))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options, those with headings below them."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                sections.setdefault(_heading(parameter), []).append(record)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)

    def _print_all(self, context: typer.Context, requested: bool) -> None:
        if not requested:
            return
        for option in self._rare:
            option.hidden = False  # type: ignore[attr-defined]
        echo(context.get_help())
        raise typer.Exit


def is_listed(parameter: Any) -> bool:
    """Return whether a help has a command's parameter, at least with all options."""
    return _is_rare(parameter) or not parameter.hidden


def _is_rare(parameter: Any) -> bool:
    return getattr(parameter, "rich_help_panel", None) is not None


def _heading(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return "Arguments"
    return parameter.rich_help_panel or "Options"


def _help_all(rare: int, print_all: Callable[..., None]) -> Any:
    """Return the option that shows all options, as typer makes it of a function's
    parameter."""
    option = typer.Option(
        "--help-all",
        help=f"Show {rare} more options, too.",
        is_eager=True,
        expose_value=False,
        callback=print_all,
    )

    def declare(help_all: Annotated[bool, option] = False) -> None: ...

    app = typer.Typer(add_completion=False)
    app.command()(declare)
    return typer.main.get_command(app).params[0]
