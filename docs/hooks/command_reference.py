"""MkDocs hook: write the reference of all commands into the page that asks for it, from the commands themselves."""

from __future__ import annotations

from typing import Any, get_args

import typer

from ebbtide.cli import make_app
from ebbtide.cli.command import HEADINGS, find_commands

MARKER = "<!-- reference of all commands -->"


def command_reference() -> str:
    """Return Markdown with a section per group and command: synopsis, description, arguments and options."""
    app: Any = typer.main.get_command(make_app())
    lines = []
    for heading in HEADINGS:
        lines += [f"## {heading}", ""]
        for name in (entry.name for entry in find_commands(None) if entry.heading == heading):
            lines += [f"### ebbtide {name}", "", *_command(name, app.commands[name]), ""]
    return "\n".join(lines)


def _command(name: str, command: Any) -> list[str]:
    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    options = [parameter for parameter in command.params if parameter.param_type_name == "option"]
    synopsis = [f"ebbtide {name}", "[OPTIONS]" if options else "", *map(_synopsis, arguments)]
    lines = ["```", " ".join(part for part in synopsis if part), "```", "", command.help, ""]
    lines += ["| argument or option | meaning | default |", "| --- | --- | --- |"]
    return lines + [_row(parameter) for parameter in (*arguments, *options) if not parameter.hidden]


def _synopsis(argument: Any) -> str:
    word = (argument.metavar or argument.name.upper()).strip("[]")
    repeated = "..." if argument.nargs == -1 and not word.endswith("...") else ""
    return word + repeated if argument.required else f"[{word}{repeated}]"


def _row(parameter: Any) -> str:
    cells = (_words(parameter), parameter.help + _range(parameter), _default(parameter))
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _range(parameter: Any) -> str:
    """Return the sentence about the least and largest value, if there are any."""
    if parameter.max is not None:
        return f" From {parameter.min:,} to {parameter.max:,}."
    return f" At least {parameter.min:,}." if parameter.min is not None else ""


def _default(parameter: Any) -> str:
    """Return a default in words as words, and a value as code."""
    if isinstance(parameter.show_default, str):
        return parameter.show_default
    if parameter.required:
        return "required"
    return "-" if parameter.default is None or parameter.default is False else f"`{parameter.default}`"


def _words(parameter: Any) -> str:
    """Return what a user writes: `-o`, `--output FILE`, or the name of an argument."""
    value = parameter.metavar or "|".join(_choices(parameter.type_descriptor.annotation)) or parameter.name.upper()
    if parameter.param_type_name == "argument":
        return f"`{value.strip('[]')}`"
    *short, long = parameter.opts
    return ", ".join(f"`{option}`" for option in (*short, long if parameter.is_flag else f"{long} {value}"))


def _choices(annotation: Any) -> list[str]:
    """Return the words that a literal type allows, also one inside of a union."""
    parts = [[part] if isinstance(part, str) else _choices(part) for part in get_args(annotation)]
    return [choice for part in parts for choice in part]


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the reference in the place of the marker."""
    return markdown.replace(MARKER, command_reference()) if MARKER in markdown else markdown
