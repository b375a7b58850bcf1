"""Registers commands: files in the folder `commands`, and commands that features plug
in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ebbtide import seams
from ebbtide.errors import UserError

# Headings of the help, in its order. The commands below the first one are those to
# begin with.
HEADINGS = ("Start", "Record", "Explain", "Predict", "Run", "Files")
# Short names of tables of `summary`. No help lists them.
ALIASES = {"activity": ("summary", "--by", "activity")}
_COMMANDS: dict[str, Command] = {}

Function = TypeVar("Function", bound=Callable[..., Any])


class Command(NamedTuple):
    """A command of the command line."""

    name: str  # The word after `ebbtide`.
    # Runs it; its parameters are the options, its docstring is the help.
    run: Callable[..., Any]
    heading: str  # One of `HEADINGS`.
    # Place below the heading; commands of the same place are sorted by name.
    position: int
    # Whether all words after the first one that is not an option belong to a job.
    runs_a_job: bool
    # Whether standard output is a job's, or the terminal of a view.
    shares_stdout: bool
    examples: tuple[str, ...]  # Command lines for its help, without `ebbtide`.
    # The extra that has all of its packages; None: the base install, or the extra of
    # the package.
    extra: str | None


def command(
    heading: str,
    position: int = 99,
    *,
    runs_a_job: bool = False,
    shares_stdout: bool = False,
    examples: tuple[str, ...] = (),
    extra: str | None = None,
) -> Callable[[Function], Function]:
    """Decorate the function of a command: see `Command`.

    The function is in a file of the same name in `commands`.
    """
    assert heading in HEADINGS, heading

    def register(function: Function) -> Function:
        name = function.__name__.strip("_").replace("_", "-")
        assert name not in _COMMANDS, f"two commands are named {name}"
        _COMMANDS[name] = Command(
            name=name,
            run=function,
            heading=heading,
            position=position,
            runs_a_job=runs_a_job,
            shares_stdout=runs_a_job or shares_stdout,
            examples=examples,
            extra=extra,
        )
        return function

    return register


def without_alias(arguments: Sequence[str]) -> list[str]:
    """Return a command line with the words that an alias stands for."""
    words = list(arguments)
    place = next(
        (index for index, word in enumerate(words) if not word.startswith("-")),
        len(words),
    )
    name = words[place : place + 1]
    return [*words[:place], *ALIASES.get("".join(name), name), *words[place + 1 :]]


def extra_of(name: str | None) -> str | None:
    """Return the extra of a command that was imported; None where it has none."""
    return _COMMANDS[name].extra if name in _COMMANDS else None


def find_commands(name: str | None) -> list[Command]:
    """Return the command of a name, or all commands.

    All are in the order of the help, and returned where there is none of that name.
    """
    if name in _COMMANDS:
        return [_COMMANDS[name]]
    files = sorted((Path(__file__).parent / "commands").glob("[a-z]*.py"))
    commands = {
        path.stem.replace("_", "-"): seams.Plug(__package__, f"commands.{path.stem}")
        for path in files
    }
    commands.update(seams.plugs("commands"))
    names = [name] if name in commands else [*commands]
    for one in names:
        commands[one].load()
    for one in names:
        if one not in _COMMANDS:
            raise UserError(
                f"the command {one!r} of {commands[one].package} has a function of "
                "another name: both must be equal"
            )
    listed = [_COMMANDS[one] for one in names]
    return sorted(
        listed,
        key=lambda entry: (HEADINGS.index(entry.heading), entry.position, entry.name),
    )
