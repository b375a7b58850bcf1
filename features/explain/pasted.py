"""The lines of a text that was pasted or written by a program, without decoration.

Escapes of terminals, quotation marks of mails and overwritten progress bars are taken
out; numbers of lines stay those of the text.
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ebbtide.errors import UserError

STDIN = Path("-")
# Of a longer text, the begin and the end are read: jobs state their settings in the
# one, and their error in the other.
_HEAD_BYTES = 2 << 20
_TAIL_BYTES = 6 << 20
_MAX_LINE_CHARS = 1 << 14
_ESCAPES = re.compile(
    r"\x1b(?:\[[0-9;?]*[A-Za-z]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[()][A-Z0-9])"
)
_QUOTES = re.compile(r"^(?:[ \t]{0,3}>[ \t]?)+")
# Patterns of blanks take time in the square of their number.
_MAX_BLANKS = 100
_MANY_BLANKS = re.compile(rf"[ \t]{{{_MAX_BLANKS},}}")
# Where the end of a line of a terminal was, a copy may have the blanks to its right.
_BREAK = re.compile(r"(?<=\S) {20,}(?=\S)")
# Values as NumPy 2 prints them.
_NUMPY_VALUE = re.compile(r"\bnp\.(?:float|int)\d{1,3}\((-?[\d.e+\-]{1,40}|nan|inf)\)")
_BLANKS = re.compile(r"[\u00a0\u2000-\u200a\u202f\u3000]")
_INVISIBLE = re.compile(
    r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\ufeff]"
)


@dataclass(frozen=True)
class PastedLine:
    """A line of a text; a progress bar has one for each time it was drawn."""

    number: int  # From 1.
    text: str


@dataclass(frozen=True)
class PastedText:
    """A text to explain."""

    name: str  # Name of the file; `standard input`.
    lines: tuple[PastedLine, ...]
    # Bytes in the middle that were left out.
    skipped_bytes: int = 0


def read_pasted(path: Path) -> PastedText:
    """Read a file, or standard input for `-`. Raises UserError."""
    if path == STDIN:
        return _read(sys.stdin.buffer, "standard input")
    try:
        with path.open("rb") as file:
            return _read(file, str(path))
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"{path} cannot be read: {reason}") from None


def _read(file: IO[bytes], name: str) -> PastedText:
    head = file.read(_HEAD_BYTES)
    tail, skipped_bytes = _last_bytes(file, _TAIL_BYTES)
    if not skipped_bytes:
        lines = clean_lines(decoded(head + tail))
        return PastedText(name, tuple(lines))
    first = list(clean_lines(decoded(head)))
    # The number of lines that were left out is not known.
    rest = clean_lines(decoded(tail), first[-1].number + 1)
    return PastedText(name, (*first, *rest), skipped_bytes)


def _last_bytes(file: IO[bytes], count: int) -> tuple[bytes, int]:
    """Return the last bytes of the rest of a file, and how many were before them."""
    kept, skipped = b"", 0
    while chunk := file.read(count):
        joined = kept + chunk
        kept = joined[-count:]
        skipped += len(joined) - len(kept)
    return kept, skipped


def decoded(data: bytes) -> str:
    """Return bytes as text: UTF-16 by its mark or its zeros, else UTF-8."""
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return data.decode("utf-16", errors="replace")
    if data[1:200:2].count(0) > 90:
        return data.decode("utf-16-le", errors="replace")
    return data.decode("utf-8-sig", errors="replace")


def clean_lines(text: str, first_number: int = 1) -> Iterator[PastedLine]:
    """Yield the lines of a text without decoration, and those that a carriage return
    overwrote as lines of the same number."""
    for number, raw_line in enumerate(text.split("\n"), first_number):
        for part in raw_line.split("\r"):
            line = _clean(part[:_MAX_LINE_CHARS])
            if line:
                yield PastedLine(number, line)


def _clean(line: str) -> str:
    if not line.isascii():
        line = _BLANKS.sub(" ", line)
    if "\x1b" in line:
        line = _ESCAPES.sub("", line)
    if not line.isprintable():
        line = _INVISIBLE.sub("", line)
    line = _MANY_BLANKS.sub(" " * _MAX_BLANKS, line.rstrip())
    if "np." in line:
        line = _NUMPY_VALUE.sub(r"\1", line)
    return _QUOTES.sub("", line)


def unbroken(text: str) -> str:
    """Return a line without the blanks by which a terminal has broken its words."""
    return _BREAK.sub("", text)
