"""Prints tables and lines of results as plain text of a given width.

Also as Markdown for comments of pull requests.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import zip_longest

from ebbtide.analysis.tables.table import PrintedColumn, Table, View
from ebbtide.terminal_lines import MAX_NAME, unbroken_words, wrapped

_GAP = "  "


def table_lines(table: Table, width: int) -> Iterator[str]:
    """Yield the heading and rows of a table, and a line on the last columns if there is
    no space for them.

    Numbers and names stay whole, other texts are wrapped."""
    columns = table.columns
    if not columns:
        return
    left_out: list[str] = []
    while (widths := _widths(columns, width)) is None and len(columns) > 1:
        left_out.insert(0, columns.pop().label)
    widths = widths or [
        max(len(columns[0].heading), *(len(cell.text) for cell in columns[0].cells))
    ]
    headings = [
        wrapped(column.heading, size)
        if len(column.heading) > size
        else [column.heading]
        for column, size in zip(columns, widths, strict=True)
    ]
    height = max(map(len, headings))
    yield from _lines(
        columns,
        [[""] * (height - len(heading)) + heading for heading in headings],
        widths,
    )
    for cells in zip(*(column.cells for column in columns), strict=True):
        yield from _lines(
            columns,
            [
                wrapped(cell.text, size)
                for cell, size in zip(cells, widths, strict=True)
            ],
            widths,
        )
    if left_out:
        yield from wrapped(f"In a wider terminal also: {', '.join(left_out)}.", width)


def _lines(
    columns: Sequence[PrintedColumn], cells: Sequence[list[str]], widths: Sequence[int]
) -> Iterator[str]:
    """Yield the lines of a row of cells, which have one or more lines each."""
    for parts in zip_longest(*cells, fillvalue=""):
        padded = (
            part.rjust(size) if column.is_number else part.ljust(size)
            for part, size, column in zip(parts, widths, columns, strict=True)
        )
        yield _GAP.join(padded).rstrip()


def _widths(columns: Sequence[PrintedColumn], width: int) -> list[int] | None:
    """Return the widths of columns that fill a line; None where they do not fit.
    Headings have as few lines as there is space for, and the widest texts are wrapped
    first."""
    left = width - len(_GAP) * (len(columns) - 1)
    least = [
        _least_width(column, is_first=not index) for index, column in enumerate(columns)
    ]
    if sum(least) > left:
        return None
    cells = [max(len(cell.text) for cell in column.cells) for column in columns]
    for lines in range(1, max(len(column.heading.split()) for column in columns) + 1):
        headings = [_heading_width(column.heading, lines) for column in columns]
        widths = [max(sizes) for sizes in zip(cells, headings, least, strict=True)]
        if sum(widths) <= left:
            return widths
    while sum(widths) > left:
        widest = max(
            (index for index in range(len(widths)) if widths[index] > least[index]),
            key=lambda i: widths[i],
        )
        widths[widest] -= 1
    return widths


def _heading_width(heading: str, lines: int) -> int:
    """Return the width in which a heading has `lines` lines.

    If it has fewer words, it has as many lines as words.
    """
    longest_word = max(map(len, heading.split()), default=0)
    return next(
        (
            size
            for size in range(longest_word, len(heading))
            if len(wrapped(heading, size)) <= lines
        ),
        len(heading),
    )


def _least_width(column: PrintedColumn, is_first: bool) -> int:
    heading = max(map(len, column.heading.split()), default=0)
    if column.is_number or is_first:
        return max(heading, *(min(MAX_NAME, len(cell.text)) for cell in column.cells))
    words = (word for cell in column.cells for word in unbroken_words(cell.text))
    return max(heading, *(min(MAX_NAME, len(word)) for word in words), 1)


_HTML = {"<": "&lt;", ">": "&gt;", "@": "&#64;"}


def markdown_lines(view: View) -> Iterator[str]:
    """Yield a result as Markdown.

    Its first line is bold, a table below it open, and all others are folded.
    """
    for number, part in enumerate(view):
        if isinstance(part, str):
            mark = "" if number else "**"
            yield f"{mark}{_escaped(part)}{mark}\n"
        elif part:
            yield f"<details{' open' if number == 1 else ''}><summary>{_escaped(part.title)}</summary>\n"
            yield _row([column.heading for column in part.columns])
            yield _row(
                ["---:" if column.is_number else "---" for column in part.columns]
            )
            yield from (_row([cell.text for cell in cells]) for cells in part.rows)
            yield f"\n{_escaped(part.note or '')}\n</details>\n"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(map(_escaped, cells))} |"


def _escaped(text: str) -> str:
    """Return a text without Markdown or HTML of its own.

    Names and commands come from the job.
    """
    line = " ".join(text.split())
    return re.sub(
        r"[\\`*_{}\[\]<>|#@]", lambda mark: _HTML.get(mark[0], f"\\{mark[0]}"), line
    )
