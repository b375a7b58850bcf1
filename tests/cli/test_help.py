"""The help of all commands and of each."""

from __future__ import annotations

import shlex
from collections import defaultdict

import pytest
import typer.main

from ebbtide import __version__
from ebbtide.cli import make_app
from ebbtide.cli.command import HEADINGS, find_commands
from ebbtide.cli.help import is_listed
from tests.conftest import ebbtide, ebbtide_in_process, needs_all_features

COMMANDS = find_commands(None)


@needs_all_features
def test_help__has_the_commands_to_begin_with_a_line_each_and_the_others_by_name() -> (
    None
):
    result = ebbtide("--help", env={"COLUMNS": "80"})
    assert (result.returncode, result.stderr) == (0, "")
    assert ebbtide_in_process().stdout == ebbtide_in_process("--help").stdout
    assert ebbtide_in_process("--version").stdout == f"ebbtide {__version__}\n"
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    first = [
        line.split()[0]
        for line in lines[lines.index("Commands:") + 1 :]
        if line[:3].strip() and line[:2] == "  "
    ]
    assert first[:8] == [
        "profile",
        "dry-run",
        "summary",
        "findings",
        "windows",
        "report",
        "replay",
        "plan",
    ]
    named = set(result.stdout.replace(",", " ").split())
    assert {entry.name for entry in COMMANDS} <= named


def test_help__of_a_command_has_two_examples_that_it_takes() -> None:
    for entry in COMMANDS:
        assert entry.heading in HEADINGS
        assert len(entry.examples) == 2
        command = typer.main.get_command(make_app(entry.name)).commands[entry.name]  # type: ignore[attr-defined]
        for example in entry.examples:
            name, *words = shlex.split(example)
            assert name == entry.name
            # Raises if an option does not exist, or a value has another type.
            command.make_context(name, words, resilient_parsing=True)


@needs_all_features
def test_help__says_the_same_of_an_option_in_every_command() -> None:
    helps = defaultdict(set)
    for command in typer.main.get_command(make_app()).commands.values():  # type: ignore[attr-defined]
        for parameter in command.params:
            if parameter.param_type_name == "option" and is_listed(parameter):
                helps[tuple(parameter.opts)].add(parameter.help)
    different = {names[-1] for names, texts in helps.items() if len(texts) > 1}
    assert different == {
        *(
            "--backward-ms",
            "--by",
            "--format",
            "--forward-ms",
            "--help-all",
            "--layers",
            "--params",
            # One of them, or several.
            "--policy",
            "--ranks",
            "--storage",
        ),
    }
    assert {"--output", "--plot", "--machine", "--iterations", "--steps"} <= {
        names[-1] for names in helps
    }


@pytest.mark.parametrize("columns", [80, 120])
def test_help__fits_the_terminal(columns: int) -> None:
    result = ebbtide("replay", "--help", env={"COLUMNS": str(columns)})
    assert max(map(len, result.stdout.splitlines())) <= columns
    assert "ebbtide replay run.ebb --recommend" in result.stdout
    assert "…" not in result.stdout


def test_help__has_at_most_20_options_and_help_all_the_others_under_headings() -> None:
    for entry in COMMANDS:
        command = typer.main.get_command(make_app(entry.name)).commands[entry.name]  # type: ignore[attr-defined]
        options = [
            option for option in command.params if option.param_type_name == "option"
        ]
        rare = [option for option in options if option.rich_help_panel]
        shown = ebbtide_in_process(entry.name, "--help").stdout
        names = [
            line.split()[0]
            for line in shown.splitlines()
            if line.startswith("  -") and line[:5] != "  -- "
        ]
        assert len(names) <= 20, entry.name
        assert ("--help-all" in names) == bool(rare)
        assert not any(f"  {option.opts[0]} " in shown for option in rare)
        if rare:
            everything = ebbtide_in_process(entry.name, "--help-all").stdout
            assert f"Show {len(rare)} more options" in everything
            assert all(f"  {option.opts[0]} " in everything for option in rare)
            assert all(
                f"\n{option.rich_help_panel}:\n" in everything for option in rare
            )
