"""The rows of a monitor file as text, with the names and units of its columns."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from typing import Any

import pandas as pd

from ebbtide.profiler.importers.source import Source, SourceError

# Names of the column that a CSV cannot do without.
TIME = ("timestamp", "time", "datetime", "date_time")
_DMON = re.compile(r"#\s*(?:date|time|gpu)\b", re.IGNORECASE)
# What dmon counts in, where it was told not to say so.
_DMON_UNITS = {"fb": "mb", "rxpci": "mb/s", "txpci": "mb/s"}
# A row of `nvidia-smi --query-gpu=timestamp,...` whose header was turned off.
_BARE = re.compile(r"\d{4}/\d\d/\d\d \d\d:\d\d:\d\d\.\d{3},")
_UNIT = re.compile(r"[\d.]{1,20}\s{0,4}([KMG]i?B|B)(?:/s)?", re.IGNORECASE)
# No row is so long: what has no line's end for that long is no table.
_BLOCK = 1 << 20


@dataclass(frozen=True)
class Table:
    """names and units of the columns, in lower case; a unit is "" where the file does not tell it. rows: text, NaN
    where a row has nothing; column n is the n-th name, and one more holds what a row has too many."""

    names: list[str]
    units: list[str]
    rows: pd.DataFrame

    def column(self, names: tuple[str, ...]) -> int | None:
        """The number of the first of the names that the file has."""
        return next((self.names.index(name) for name in names if name in self.names), None)

    def text(self, column: int) -> pd.Series[str]:
        return self.rows[column].fillna("").str.strip(' "')


def looks_like_dmon(source: Source) -> bool:
    return any(_DMON.match(line) for line in _head(source))


def header_names(source: Source) -> list[set[str]]:
    """The names in each line of the file's beginning, as if it were a header. One with a time for a name is no header
    but a row without one, and gets the names that it would have."""
    return [
        {*TIME, "memory.used"} if _BARE.match(line) else {_name(f)[0] for f in line.split(",")}
        for line in _head(source)
    ]


def read_table(source: Source) -> Table:
    """Raises SourceError where a file has no header, no rows, or is no text."""
    with source.open() as file:
        while block := file.read(_BLOCK):
            if b"\0" in block or (len(block) == _BLOCK and b"\n" not in block and b"\r" not in block):
                raise source.damaged("it is no table of text")
    return _dmon(source) if looks_like_dmon(source) else _csv(source)


def _head(source: Source) -> list[str]:
    """The lines that may be a header, as many as stand in the file before its rows."""
    return [line.strip() for line in source.head.decode("utf-8-sig", "replace").splitlines()[:50]]


def _name(field: str) -> tuple[str, str]:
    """(name, unit) of a header field: `memory.used [MiB]`."""
    name, _, unit = field.strip(' "#').lower().partition("[")
    return name.strip(), unit.strip(" ]")


def _csv(source: Source) -> Table:
    head = _head(source)
    header = next((n for n, line in enumerate(head) if {_name(f)[0] for f in line.split(",")} & set(TIME)), None)
    if header is None:
        raise SourceError(f"{source} has no header with a timestamp: record it with --format=csv, not csv,noheader")
    fields = [_name(field) for field in head[header].split(",")]
    rows = _read(source, len(fields), skiprows=header + 1, skipinitialspace=True)
    # A file that was appended to has its header again.
    place = next(n for n, (name, _) in enumerate(fields) if name in TIME)
    rows = rows[rows[place].fillna("").str.strip(' "').str.lower() != fields[place][0]]
    # Each value carries its unit, unless nounits was asked for: then the header does.
    units = [unit or _unit_of(rows[place]) for place, (_, unit) in enumerate(fields)]
    return Table([name for name, _ in fields], units, rows)


def _dmon(source: Source) -> Table:
    """`#` lines are headers, names above units, and come again every so many rows; values stand apart by spaces, or by
    commas with --format csv."""
    heads = [line.lstrip("# ").lower() for line in _head(source) if line.startswith("#")]
    comma = "," in heads[0]
    names, *below = ([part.strip() for part in (line.split(",") if comma else line.split())] for line in heads[:2])
    told = below and len(below[0]) == len(names) and below[0] != names
    units = below[0] if told else [_DMON_UNITS.get(name, "") for name in names]
    return Table(names, units, _read(source, len(names), sep="," if comma else r"\s+", comment="#"))


def _read(source: Source, columns: int, **options: Any) -> pd.DataFrame:
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
    found = (_UNIT.fullmatch(value.strip(' "')) for value in values.head(100).dropna())
    return next((match.group(1).lower() for match in found if match), "")
