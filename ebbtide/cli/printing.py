"""The standard output of commands: what `echo` and `console` print, and nothing of any library."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from functools import cache
from typing import TYPE_CHECKING, TextIO

import typer

if TYPE_CHECKING:
    from rich.console import Console

# Where a running command prints; None: to `sys.stdout`.
_output: TextIO | None = None


def echo(text: str = "") -> None:
    """Print a text and a line break as output of the command."""
    typer.echo(text, file=_output)


def console(width: int | None = None) -> Console:
    """Return a console that prints as output of the command; `width` None: as wide as the terminal."""
    from rich.console import Console

    return Console(file=_output, width=width)


@contextmanager
def own_stdout() -> Iterator[None]:
    """Keep standard output for `echo` and `console`: what anything else prints goes to stderr meanwhile.

    Libraries in C write to descriptor 1, some of them when the process ends, and child processes inherit it. In a
    process of its own a command therefore leaves descriptor 1 to stderr for good, and prints to a copy of it.
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
    # A number above those of the standard streams, of which one may be closed.
    descriptor = fcntl.fcntl(stdout.fileno(), fcntl.F_DUPFD_CLOEXEC, 3)
    os.dup2(2 if sys.stderr is not None else os.open(os.devnull, os.O_WRONLY), stdout.fileno())
    return open(descriptor, "w", encoding=stdout.encoding, errors=stdout.errors)
