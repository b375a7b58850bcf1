"""Lines for a terminal: how wide it is, where lines are broken, and notes on stderr."""

import os
import re
import shutil
import sys
import textwrap
from typing import TextIO

from ebbtide.foreign_text import printable_line

_FILE_WIDTH = 140
# Names up to this length are never broken; names of kernels are longer.
MAX_NAME = 40
# A space that is printed as such, but at which no line is broken.
_KEPT_SPACE = "\ue000"
_PREFIX = "ebbtide: "
# What the further lines of a line stay clear of.
_LEADER = re.compile(rf" *({_PREFIX})?(- |\w+  +|\d+\. |next: |note: )?")
_BEFORE_UNIT = re.compile(
    r"(?<=\d) "
    r"(?=(ms|us|s|h|%|x|[kMGT]i?B(/s)?|[GM]|TFLOP/s|parameters|params)(?![\w-]))"
)


def is_terminal(stream: TextIO | None) -> bool:
    """Return whether people read a stream at a certain width: on a terminal, or as
    COLUMNS says; None: it is closed."""
    return bool(os.environ.get("COLUMNS")) or _terminal_width(stream) is not None


def stream_width(stream: TextIO | None) -> int:
    """Return the number of columns by COLUMNS, else of the stream's terminal; a file
    has more."""
    return shutil.get_terminal_size(
        (_terminal_width(stream) or _FILE_WIDTH, 24)
    ).columns


def _terminal_width(stream: TextIO | None) -> int | None:
    """Return the number of columns of a stream's terminal, 0 if not known.

    Return None if it has no terminal.
    """
    try:
        return (
            os.get_terminal_size(stream.fileno()).columns
            if stream is not None
            else None
        )
    except (AttributeError, OSError, ValueError):
        # Jobs replace their stderr with objects of their own.
        return None


def wrapped(line: str, width: int, whole_words: bool = False) -> list[str]:
    """Return a line as lines of at most `width` characters, indented alike.

    Numbers stay with their units, and longer words whole, but for names of kernels and
    the like, unless `whole_words`.
    """
    leader = _LEADER.match(line)
    hanging = " " * (leader.end() if leader else 0)
    kept = _BEFORE_UNIT.sub(_KEPT_SPACE, line)
    is_long = not whole_words and any(len(word) > MAX_NAME for word in kept.split())
    lines = textwrap.wrap(
        kept,
        width,
        subsequent_indent=hanging,
        break_long_words=is_long,
        break_on_hyphens=False,
    )
    return [part.replace(_KEPT_SPACE, " ") for part in lines] or [""]


def unbroken_words(line: str) -> list[str]:
    """Return the words of a line at which `wrapped` may break it.

    Numbers are one with their units.
    """
    return _BEFORE_UNIT.sub(_KEPT_SPACE, line).split()


def print_note(line: str) -> None:
    """Print on stderr what a command says beside its output, continued on further lines
    where it is wider than the terminal.

    Paths stay whole, so that they can be copied."""
    if sys.stderr is None:
        return
    line = _PREFIX + printable_line(line)
    lines = (
        wrapped(line, stream_width(sys.stderr), whole_words=True)
        if is_terminal(sys.stderr)
        else [line]
    )
    print(*lines, sep="\n", file=sys.stderr, flush=True)
