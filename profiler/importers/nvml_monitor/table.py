"""Reads a monitor file as a table of text, with the names and units of its columns."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from typing import Any

import pandas as pd

from ebbtide.profiler.importers.source import Source, SourceError

# Names of the time column, which every CSV must have.
TIME = ("timestamp", "time", "datetime", "date_time")
_DMON = re.compile(r"#\s*(?:date|time|gpu)\b", re.IGNORECASE)
# The units of dmon, for files without its line of units.
_DMON_UNITS = {"fb": "mb", "rxpci": "mb/s", "txpci": "mb/s"}
# A row of `nvidia-smi --query-gpu=timestamp,...` whose header was turned off.
_BARE = re.compile(r"\d{4}/\d\d/\d\d \d\d:\d\d:\d\d\.\d{3},")
_UNIT = re.compile(r"[\d.]{1,20}\s{0,4}([KMG]i?B|B)(?:/s)?", re.IGNORECASE)
# No row is this long: a file without a line end in so many bytes is not a table.
_BLOCK_BYTES = 1 << 20
_MAX_HEADER_LINES = 50
_MAX_UNIT_ROWS = 100


@dataclass(frozen=True)
class MonitorTable:
    """A monitor file as text.

    Attributes:
        names: Names of the columns, in lower case.
        units: Units of the columns, in lower case; "" if the file does not state one.
        rows: Text; NaN for an empty field. Column n belongs to the n-th name. One more column holds the surplus field
            of rows that have too many.
    """

    names: list[str]
    units: list[str]
    rows: pd.DataFrame

    def column(self, names: tuple[str, ...]) -> int | None:
        """Return the index of the column with the first of these names that the file has."""
        return next((self.names.index(name) for name in names if name in self.names), None)

    def text(self, column: int) -> pd.Series[str]:
        """Return the text of a column, without quotes and surrounding spaces."""
        return self.rows[column].fillna("").str.strip(' "')


def looks_like_dmon(source: Source) -> bool:
    """Return whether a file has a header of `nvidia-smi dmon`."""
    return any(_DMON.match(line) for line in _first_lines(source))


def header_names(source: Source) -> list[set[str]]:
    """Return the names in each of the first lines, read as a header.

    A line that begins with a time is a row of a file without a header. It gets the names that the header would have.
    """
    return [
        {*TIME, "memory.used"} if _BARE.match(line) else {_name_and_unit(f)[0] for f in line.split(",")}
        for line in _first_lines(source)
    ]


def read_table(source: Source) -> MonitorTable:
    """Read a monitor file. Raise SourceError if it has no header, no rows, or is not text."""
    with source.open() as file:
        while block := file.read(_BLOCK_BYTES):
            if b"\0" in block or (len(block) == _BLOCK_BYTES and b"\n" not in block and b"\r" not in block):
                raise source.damaged("it is not a table of text")
    return _read_dmon(source) if looks_like_dmon(source) else _read_csv(source)


def _first_lines(source: Source) -> list[str]:
    """Return the lines that may be a header: other output may precede it."""
    return [line.strip() for line in source.head.decode("utf-8-sig", "replace").splitlines()[:_MAX_HEADER_LINES]]


def _name_and_unit(field: str) -> tuple[str, str]:
    """Split a header field such as `memory.used [MiB]` into name and unit."""
    name, _, unit = field.strip(' "#').lower().partition("[")
    return name.strip(), unit.strip(" ]")


def _read_csv(source: Source) -> MonitorTable:
    lines = _first_lines(source)
    header = next(
        (n for n, line in enumerate(lines) if {_name_and_unit(f)[0] for f in line.split(",")} & set(TIME)), None
    )
    if header is None:
        raise SourceError(f"{source} has no header with a timestamp: record it with --format=csv, not csv,noheader")
    fields = [_name_and_unit(field) for field in lines[header].split(",")]
    rows = _read_rows(source, len(fields), skiprows=header + 1, skipinitialspace=True)
    # A file that was appended to has its header again.
    time_column = next(n for n, (name, _) in enumerate(fields) if name in TIME)
    rows = rows[rows[time_column].fillna("").str.strip(' "').str.lower() != fields[time_column][0]]
    # Each value has its unit, unless nounits was given: then the header has it.
    units = [unit or _unit_of(rows[column]) for column, (_, unit) in enumerate(fields)]
    return MonitorTable([name for name, _ in fields], units, rows)


def _read_dmon(source: Source) -> MonitorTable:
    """Read output of `nvidia-smi dmon`.

    Lines with `#` are headers, names above units, and recur every few rows. Values are separated by spaces, or by
    commas with `--format csv`.
    """
    headers = [line.lstrip("# ").lower() for line in _first_lines(source) if line.startswith("#")]
    comma = "," in headers[0]
    names, *below = ([field.strip() for field in (line.split(",") if comma else line.split())] for line in headers[:2])
    has_units = below and len(below[0]) == len(names) and below[0] != names
    units = below[0] if has_units else [_DMON_UNITS.get(name, "") for name in names]
    return MonitorTable(names, units, _read_rows(source, len(names), sep="," if comma else r"\s+", comment="#"))


def _read_rows(source: Source, columns: int, **options: Any) -> pd.DataFrame:
    try:
        with source.text() as file:
            rows = pd.read_csv(
                file, header=None, names=range(columns + 1), index_col=False, dtype="str", keep_default_na=False,
                na_values=[""], on_bad_lines="skip", quoting=csv.QUOTE_NONE, **options,
            )  # fmt: skip
    except (pd.errors.ParserError, ValueError, OverflowError) as error:
        raise source.damaged(error) from None
    if rows.empty:
        raise SourceError(f"{source} has a header and no rows")
    return rows


def _unit_of(values: pd.Series[str]) -> str:
    matches = (_UNIT.fullmatch(value.strip(' "')) for value in values.head(_MAX_UNIT_ROWS).dropna())
    return next((match.group(1).lower() for match in matches if match), "")
