"""Kinds of lines that tools print, as files of the folder `readers` list them."""

import re
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib import resources
from typing import Any

from ebbtide.features.explain.pasted import PastedLine, PastedText, unbroken

# An entry of a file, and its expression compiled.
LineFormat = tuple[dict[str, str], re.Pattern[str]]


@cache
def file_content(name: str) -> dict[str, Any]:
    """Return the content of a TOML file of this package."""
    file = resources.files(__package__).joinpath(name)
    return tomllib.loads(file.read_text(encoding="utf-8"))


@cache
def line_formats(name: str) -> tuple[LineFormat, ...]:
    """Return the kinds of lines of a file; their expressions ignore the case."""
    entries = file_content(name)["line"]
    flags = re.IGNORECASE
    return tuple((entry, re.compile(entry["expression"], flags)) for entry in entries)


def matching_lines(
    text: PastedText, name: str
) -> Iterator[tuple[dict[str, str], re.Match[str], PastedLine]]:
    """Yield the lines of a text that have a format of a file, with its entry."""
    formats = line_formats(name)
    for line in text.lines:
        whole = unbroken(line.text)
        matches = list(_matches(line.text, formats))
        if not matches and whole != line.text:
            matches = list(_matches(whole, formats))
        for entry, match in matches:
            yield entry, match, line


def _matches(
    text: str, formats: tuple[LineFormat, ...]
) -> Iterator[tuple[dict[str, str], re.Match[str]]]:
    lowered = text.lower()
    for entry, pattern in formats:
        if entry["has"] in lowered:
            for match in pattern.finditer(text):
                yield entry, match
