"""Text from files of others, for a terminal.

Names of kernels, files and modules may contain any character.
"""

import re

# Control characters of both ranges but line breaks and tabs, separators of lines, and
# marks that reorder what follows.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]"
)


def printable(text: str) -> str:
    """Return a text with escapes for characters that are unsafe in a terminal.

    An escape is as in `\\x1b`; such characters could control a terminal or hide text.
    """
    return _UNSAFE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def printable_line(text: str) -> str:
    """Return a text as one line, without characters that could control a terminal."""
    return printable(text.replace("\r\n", " ").replace("\n", " ").replace("\t", " "))


def masked(text: str) -> str:
    """Return a text of the same length, with `?` for characters that could control a
    terminal."""
    return _UNSAFE.sub("?", text)
