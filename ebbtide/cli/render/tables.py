"""Prints tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.markup import escape
from rich.table import Table

from ebbtide.cli.printing import console, echo

# More rows than this are for a program (`--json`), not for a person.
MAX_ROWS = 40
_FILE_WIDTH = 140


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int = 1) -> None:
    """Print a table; the first columns are text, the others are figures."""
    grid = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, title_style="bold")
    for number, column in enumerate(columns):
        grid.add_column(column, justify="right" if number >= text_columns else "left")
    for row in rows:
        grid.add_row(*map(escape, row))
    terminal = console()
    (terminal if terminal.is_terminal else console(_FILE_WIDTH)).print(grid)


def print_omitted(rows: int) -> None:
    """Print how many of `rows` rows were left out of a table of `MAX_ROWS`, if any."""
    if rows > MAX_ROWS:
        echo(f"{rows - MAX_ROWS} more rows with --json")
