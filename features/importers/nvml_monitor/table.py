"""The contents of a monitor file as a table of text, with the names and units of the
file's columns."""

from __future__ import annotations

import csv
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from ebbtide.features.importers.source import Source, SourceError

# No row is this long: a file without a line end in this many bytes is not a table.
_BLOCK_BYTES = 1 << 20
_MAX_HEADER_LINES = 50
# Number of rows with which the last one is compared.
_MAX_COMPARED = 8


@dataclass(frozen=True)
class Tool:
    """The tool that wrote a monitor file."""

    # The counter behind its link figures, as in the column `source` of the table
    # `link`.
    link_source: str = "nvml-throughput"
    # Averaging time of the link figures, here nvidia-smi's; None: the time since the
    # sample before.
    link_window_ns: int | None = 20_000_000
    time_hint: str = "dmon -o DT writes them"
    link_hint: str = "nvidia-smi dmon -s t records them"


@dataclass(frozen=True)
class MonitorTable:
    """A monitor file as text."""

    names: list[str]
    # Units of the columns, in lower case; "" if the file does not state one
    units: list[str]
    # Text, NaN for an empty field, in a column per name, and one more for the surplus
    # field of longer rows.
    rows: pd.DataFrame
    tool: Tool = Tool()
    # Lines on what was left out, each to follow the name of the file
    notes: list[str] = field(default_factory=list)

    def column(self, names: tuple[str, ...]) -> int | None:
        """Return the index of the first of these columns, given by name, that the file
        has."""
        return next(
            (self.names.index(name) for name in names if name in self.names), None
        )

    def text(self, column: int) -> pd.Series[str]:
        """Return the text of a column, without quotes and surrounding spaces."""
        return self.rows[column].fillna("").str.strip(' "')


def first_lines(source: Source) -> list[str]:
    """Return the lines that may be a header: other output may precede it."""
    return [line.strip() for line in source.head_text.splitlines()[:_MAX_HEADER_LINES]]


def check_text(source: Source) -> None:
    """Raise SourceError if a file is not lines of text."""
    with source.open_text() as file:
        while block := file.read(_BLOCK_BYTES):
            if not source.is_text or (
                len(block) == _BLOCK_BYTES and b"\n" not in block and b"\r" not in block
            ):
                raise source.damaged("it is not a table of text")


def read_rows(source: Source, columns: int, **options: Any) -> pd.DataFrame:
    """Read rows of text; `columns`: how many the header names."""
    try:
        with source.text() as file, warnings.catch_warnings():
            # Of rows that have more fields than their header.
            warnings.simplefilter("ignore", pd.errors.ParserWarning)
            rows = pd.read_csv(
                file, header=None, names=range(columns + 1), index_col=False,
                dtype="str", keep_default_na=False,
                na_values=[""], on_bad_lines="skip", quoting=csv.QUOTE_NONE, **options,
            )  # fmt: skip
    except (pd.errors.ParserError, ValueError, OverflowError) as error:
        raise source.damaged(error) from None
    if rows.empty:
        raise SourceError(f"{source} has a header and no rows")
    return rows


def ends_with_line_end(source: Source) -> bool:
    """Return whether the last line of a file has its end. If not, the file may have
    been cut off."""
    last = b""
    with source.open_text() as file:
        while block := file.read(_BLOCK_BYTES):
            last = block[-1:]
    return last in (b"\n", b"\r")


def is_cut(last: str, others: Sequence[str]) -> bool:
    """Return whether the last field of a file without a final line end looks cut off.
    It does if it is shorter than `others`, the same field of the rows before, or has
    lost the unit that they have."""
    before = [
        text
        for text in (other.strip(' "') for other in others[-_MAX_COMPARED:])
        if text
    ]
    last = last.strip(' "')
    lost_unit = last[-1:].isdigit() and not any(text[-1].isdigit() for text in before)
    return bool(before) and (lost_unit or len(last) < min(map(len, before)))


def mark_cut_row(source: Source, rows: pd.DataFrame, columns: int) -> None:
    """Give the last row a surplus field if the file was cut off within it.

    The row then counts as unreadable.
    """
    if len(rows) < 2 or ends_with_line_end(source):
        return
    *others, last = rows[columns - 1].iloc[-1 - _MAX_COMPARED :].fillna("")
    if not last or is_cut(last, others):
        rows.loc[rows.index[-1], columns] = "cut"
