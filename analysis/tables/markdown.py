"""Prints lines and tables of results as Markdown, for comments of pull requests."""

import re
from collections.abc import Iterator, Sequence

from ebbtide.analysis.tables.table import View

_HTML = {"<": "&lt;", ">": "&gt;", "@": "&#64;"}


def markdown_lines(view: View) -> Iterator[str]:
    """Yield a result as Markdown: its first line in bold, a table below it open, and all others folded."""
    for number, part in enumerate(view):
        if isinstance(part, str):
            mark = "" if number else "**"
            yield f"{mark}{_escaped(part)}{mark}\n"
        elif part:
            yield f"<details{' open' if number == 1 else ''}><summary>{_escaped(part.title)}</summary>\n"
            yield _row([column.heading for column in part.columns])
            yield _row(["---:" if column.is_number else "---" for column in part.columns])
            yield from (_row([cell.text for cell in cells]) for cells in part.rows)
            yield f"\n{_escaped(part.note or '')}\n</details>\n"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(map(_escaped, cells))} |"


def _escaped(text: str) -> str:
    """Return a text without Markdown or HTML of its own: names and commands are those of the job."""
    line = " ".join(text.split())
    return re.sub(r"[\\`*_{}\[\]<>|#@]", lambda mark: _HTML.get(mark[0], f"\\{mark[0]}"), line)
