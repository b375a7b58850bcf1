"""Registers commands: the files in the folder `commands`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

# Headings of the help, in its order. The commands below the first one are those to begin with.
HEADINGS = ("Start", "Record", "Explain", "Predict", "Run", "Files")
# Commands that others have taken in, and the words for them now. They work as before; no help lists them.
FORMER_NAMES = {
    "activity": ("summary", "--by", "activity"),
    "iterations": ("summary", "--by", "iteration"),
    "link": ("summary", "--by", "link"),
    "merge": ("import",),
    "steps": ("summary", "--by", "substep"),
    "sweep": ("replay",),
    "tables": ("export", "--format", "csv"),
}
_COMMANDS: dict[str, Command] = {}

Function = TypeVar("Function", bound=Callable[..., Any])


class Command(NamedTuple):
    """A command of the command line."""

    name: str  # The word after `ebbtide`.
    run: Callable[..., Any]  # Runs it; its parameters are the options, its docstring is the help.
    heading: str  # One of `HEADINGS`.
    position: int  # Place below the heading; commands of the same place are sorted by name.
    runs_a_job: bool  # Whether all words after the first one that is not an option belong to a job.
    shares_stdout: bool  # Whether standard output is a job's, or the terminal of a view.
    examples: tuple[str, ...]  # Command lines for its help, without `ebbtide`.


def command(
    heading: str,
    position: int = 99,
    *,
    runs_a_job: bool = False,
    shares_stdout: bool = False,
    examples: tuple[str, ...] = (),
) -> Callable[[Function], Function]:
    """Decorate the function of a command, in a file of the same name in `commands`: see `Command`."""
    assert heading in HEADINGS, heading

    def register(function: Function) -> Function:
        name = function.__name__.strip("_").replace("_", "-")
        _COMMANDS[name] = Command(name, function, heading, position, runs_a_job, runs_a_job or shares_stdout, examples)
        return function

    return register


def with_current_name(arguments: Sequence[str]) -> list[str]:
    """Return a command line with the words for a command that has another name now."""
    words = list(arguments)
    place = next((index for index, word in enumerate(words) if not word.startswith("-")), len(words))
    name = words[place : place + 1]
    return [*words[:place], *FORMER_NAMES.get("".join(name), name), *words[place + 1 :]]


def find_commands(name: str | None) -> list[Command]:
    """Return the command of a name, or all commands in the order of the help where there is none of that name."""
    if name in _COMMANDS:
        return [_COMMANDS[name]]
    files = {
        path.stem: path.stem.strip("_").replace("_", "-")
        for path in sorted((Path(__file__).parent / "commands").glob("[a-z]*.py"))
    }
    stems = [stem for stem, file_name in files.items() if file_name == name] or list(files)
    for stem in stems:
        import_module(f"ebbtide.cli.commands.{stem}")
    commands = [_COMMANDS[files[stem]] for stem in stems]
    return sorted(commands, key=lambda entry: (HEADINGS.index(entry.heading), entry.position, entry.name))
