"""Prints lines and tables of results as Markdown, for comments of pull requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ebbtide.analysis.tables.table import Table, View


def markdown_lines(view: View) -> Iterator[str]:
    """Yield a result as Markdown; the first line is its heading, and tables but the first one are folded."""
    is_first = True
    for number, part in enumerate(view):
        if isinstance(part, str):
            yield f"**{_escaped(part)}**\n" if number == 0 else f"{_escaped(part)}\n"
        elif part:
            yield from _table_lines(part) if is_first else _folded(part)
            is_first = False


def _folded(table: Table) -> Iterator[str]:
    yield f"<details><summary>{_escaped(table.title)}</summary>\n"
    yield from _table_lines(table)
    yield "</details>\n"


def _table_lines(table: Table) -> Iterator[str]:
    columns = table.columns
    yield _row([column.heading for column in columns])
    yield _row(["---:" if column.is_number else "---" for column in columns])
    for cells in table.rows:
        yield _row([cell.text for cell in cells])
    yield ""
    if table.note:
        yield f"{_escaped(table.note)}\n"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(map(_escaped, cells))} |"


def _escaped(text: str) -> str:
    """Return a text without Markdown or HTML of its own: names and commands are those of the job."""
    for mark in "\\`*_{}[]<>|#@":
        text = text.replace(mark, f"\\{mark}" if mark not in "<>@" else {"<": "&lt;", ">": "&gt;", "@": "&#64;"}[mark])
    return " ".join(text.split())
