"""MkDocs hook: write a page for each command from the command itself, and a list of
them where a page asks for it."""

from __future__ import annotations

from typing import Any, get_args

import typer
from mkdocs.structure.files import File, InclusionLevel

from ebbtide.cli import make_app
from ebbtide.cli.command import HEADINGS, Command, find_commands
from ebbtide.cli.help import first_sentence, is_listed

MARKER = "<!-- list of all commands -->"


def command_pages() -> dict[str, str]:
    """Return Markdown for each command, by its name: synopsis, description, examples,
    arguments and options."""
    app: Any = typer.main.get_command(make_app())
    return {
        entry.name: "\n".join(_page(entry, app.commands[entry.name]))
        for entry in find_commands(None)
    }


def command_list() -> str:
    """Return Markdown with a table per group of commands, whose rows lead to their
    pages."""
    lines = []
    for heading in HEADINGS:
        lines += [
            "",
            f"## {heading}",
            "",
            "| command | what it does |",
            "| --- | --- |",
        ]
        commands = [entry for entry in find_commands(None) if entry.heading == heading]
        lines += [
            f"| [{entry.name}](commands/{entry.name}.md) | {first_sentence(entry)} |"
            for entry in commands
        ]
    return "\n".join(lines)


def _page(entry: Command, command: Any) -> list[str]:
    name = entry.name
    arguments = [
        parameter
        for parameter in command.params
        if parameter.param_type_name == "argument"
    ]
    options = [
        parameter
        for parameter in command.params
        if parameter.param_type_name == "option"
    ]
    synopsis = [
        f"ebbtide {name}",
        "[OPTIONS]" if options else "",
        *map(_synopsis, arguments),
    ]
    lines = [
        f"# ebbtide {name}",
        "",
        "```",
        " ".join(part for part in synopsis if part),
        "```",
        "",
        command.help,
        "",
    ]
    lines += [
        "```console",
        *(f"$ ebbtide {example}" for example in entry.examples),
        "```",
        "",
    ]
    lines += ["| argument or option | meaning | default |", "| --- | --- | --- |"]
    return lines + [
        _row(parameter) for parameter in (*arguments, *options) if is_listed(parameter)
    ]


def _synopsis(argument: Any) -> str:
    word = (argument.metavar or argument.name.upper()).strip("[]")
    repeated = "..." if argument.nargs == -1 and not word.endswith("...") else ""
    return word + repeated if argument.required else f"[{word}{repeated}]"


def _row(parameter: Any) -> str:
    cells = (_words(parameter), parameter.help + _range(parameter), _default(parameter))
    return (
        "| "
        + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells)
        + " |"
    )


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
    return (
        "-"
        if parameter.default is None or parameter.default is False
        else f"`{parameter.default}`"
    )


def _words(parameter: Any) -> str:
    """Return what a user writes: `-o`, `--output FILE`, or the name of an argument."""
    value = (
        parameter.metavar
        or "|".join(_choices(parameter.type_descriptor.annotation))
        or parameter.name.upper()
    )
    if parameter.param_type_name == "argument":
        return f"`{value.strip('[]')}`"
    *short, long = parameter.opts
    return ", ".join(
        f"`{option}`"
        for option in (*short, long if parameter.is_flag else f"{long} {value}")
    )


def _choices(annotation: Any) -> list[str]:
    """Return the words that a literal type allows, also one inside of a union."""
    parts = [
        [part] if isinstance(part, str) else _choices(part)
        for part in get_args(annotation)
    ]
    return [choice for part in parts for choice in part]


def on_files(files: Any, config: Any) -> Any:
    """Add a page for each command."""
    for name, page in command_pages().items():
        uri = f"commands/{name}.md"
        files.append(
            File.generated(
                config, uri, content=page, inclusion=InclusionLevel.NOT_IN_NAV
            )
        )
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the list in the place of the marker."""
    return markdown.replace(MARKER, command_list()) if MARKER in markdown else markdown
