"""The standard output of commands: what `echo`, `print_view` and the like print, and
nothing of any library."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import cache
from typing import TYPE_CHECKING, Any, TextIO

import typer

from ebbtide.foreign_text import printable, printable_line
from ebbtide.terminal_lines import is_terminal, stream_width, wrapped

if TYPE_CHECKING:
    from ebbtide.analysis.tables.table import Table, View

# Where a running command prints; None: to `sys.stdout`.
_output: TextIO | None = None
# Called with a description of the current work, the amount that is done, and the total.
ProgressUpdate = Callable[[str, float, float], None]


def echo(text: str = "", **style: Any) -> None:
    """Print a text and a line break, without terminal control characters.

    `style` is for terminals only.
    """
    text = printable(text)
    typer.echo(
        typer.style(text, **style)
        if style and not os.environ.get("NO_COLOR")
        else text,
        file=_output,
    )


def echo_line(line: str, **style: Any) -> None:
    """Print a line, continued on further ones where it is wider than the terminal;
    `style`: as of `echo`."""
    line = printable_line(line)
    if prints_to_terminal():
        line = "\n".join(wrapped(line, output_width()))
    echo(line, **style)


def echo_error(line: str) -> None:
    """Print an error on stderr, one line however wide: scripts read it."""
    typer.echo(f"ebbtide: {printable_line(line)}", err=True)


def prints_to_terminal() -> bool:
    """Return whether people read the output at a certain width."""
    return is_terminal(_output or sys.stdout)


def output_width() -> int:
    """Return the number of columns of the output."""
    return stream_width(_output or sys.stdout)


def print_view(view: View) -> None:
    """Print the lines and tables of a result, without the tables that have no rows."""
    from ebbtide.analysis.tables.table import Gain, Misfit

    for part in view:
        if isinstance(part, str):
            colour = {Gain: "green", Misfit: "yellow"}.get(type(part))
            echo_line(part, **({"fg": colour} if colour else {}))
        elif part:
            print_table(part)


def print_table(table: Table) -> None:
    from ebbtide.analysis.tables.text import table_lines

    echo_line(table.title, bold=True)
    for line in table_lines(table, output_width()):
        echo(printable_line(line))
    for note in (table.note, table.cut):
        if note:
            echo_line(note)


@contextmanager
def on_stderr() -> Iterator[None]:
    """Print on stderr: what a command says beside the output of a job."""
    global _output
    before, _output = _output, sys.stderr
    try:
        yield
    finally:
        _output = before


@contextmanager
def own_stdout() -> Iterator[None]:
    """Keep standard output for `echo`.

    What libraries in C (some at exit) and child processes print goes to stderr. In a
    process of its own a command leaves descriptor 1 to stderr for good, and prints to a
    copy of it.
    """
    global _output
    if sys.stdout is None:
        # The caller has closed it.
        yield
        return
    _output = _kept_stdout() if sys.stdout is sys.__stdout__ else sys.stdout
    try:
        with redirect_stdout(sys.stderr):
            yield
    except BrokenPipeError:
        # The rest would be written, in vain, when the process ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), _output.fileno())
        raise
    finally:
        _output = None


@cache
def _kept_stdout() -> TextIO:
    """Return a stream to where descriptor 1 pointed, which is stderr from now on."""
    stdout = sys.stdout
    stdout.flush()
    descriptor = _duplicate(stdout.fileno())
    os.dup2(
        2 if sys.stderr is not None else os.open(os.devnull, os.O_WRONLY),
        stdout.fileno(),
    )
    return open(descriptor, "w", encoding=stdout.encoding, errors=stdout.errors)


def _duplicate(descriptor: int) -> int:
    """Duplicate a descriptor to a number above the standard streams.

    One of these may be closed.
    """
    try:
        import fcntl
    except ImportError:
        return os.dup(descriptor)
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)


@contextmanager
def progress_bar() -> Iterator[ProgressUpdate]:
    """Show a progress bar on stderr for the block.

    Show nothing if stderr is not a terminal.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
    )

    console = Console(stderr=True)
    columns = (
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(
        *columns,
        console=console,
        transient=True,
        refresh_per_second=2,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task("", total=None)
        yield lambda description, done, total: bar.update(
            task, description=description, completed=done, total=total
        )
