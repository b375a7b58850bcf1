"""Reads the reports in CSV files of `nsys stats`: finds their headers, and converts units."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

import numpy as np
import pandas as pd

from ebbtide.profiler.importers.nsys.capture import MAX_TIME, MISSING
from ebbtide.profiler.importers.source import Source

# "Start (ns)", "Start(nsec)", "Bytes (MB)", "Throughput (MB/s)", "Strm"
_COLUMN = re.compile(r"\s*(.*?)\s*(?:[(\[]\s*([^)\]]*?)\s*[)\]])?\s*")
_UNITS = {
    **dict.fromkeys(("ns", "nsec", "nanoseconds"), 1),
    **dict.fromkeys(("us", "usec", "µs", "microseconds"), 10**3),
    **dict.fromkeys(("ms", "msec", "milliseconds"), 10**6),
    **dict.fromkeys(("s", "sec", "seconds"), 10**9),
    **dict.fromkeys(("b", "byte", "bytes"), 1),
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30,
}  # fmt: skip
# Lines that nsys writes between reports.
_BETWEEN = ("Processing ", "NOTICE", "Generating ", "SKIPPED", " **", "[")


class ReportKind(Enum):
    """Kind of a report, with the columns by which it is recognized."""

    PROJECTED_RANGES = frozenset({"name", "projected start", "projected duration", "orig start", "orig duration"})
    RANGES = frozenset({"name", "start", "duration", "pid", "tid", "rangeid"})
    CALLS = frozenset({"name", "start", "duration", "corrid", "pid", "tid"})
    WORK = frozenset({"name", "start", "duration", "device", "strm"})


@dataclass(frozen=True)
class Report:
    """One report of a file.

    Attributes:
        kind: Its kind.
        rows: Its columns by their names in lower case and without unit. Values are as in the file.
        units: The factor to ns or bytes of each column that states a unit.
    """

    kind: ReportKind
    rows: pd.DataFrame
    units: dict[str, int]

    def integers(self, column: str) -> pd.Series:
        """Return a column in ns, bytes or without unit; MISSING where it has no number."""
        if column not in self.rows:
            return pd.Series(MISSING, self.rows.index, dtype=np.int64)
        values = pd.to_numeric(self.rows[column], errors="coerce")
        unit = self.units.get(column, 1)
        scaled = values * unit if values.dtype == np.int64 else (values * unit).round()
        return scaled.where((scaled >= 0) & (scaled <= MAX_TIME), MISSING).fillna(MISSING).astype(np.int64)

    def texts(self, column: str) -> pd.Series:
        """Return a column of texts; empty where it has none."""
        if column not in self.rows:
            return pd.Series("", self.rows.index, dtype=object)
        values = self.rows[column].astype(object)
        return values.where(values.notna(), "").astype(str)


def has_report(source: Source) -> bool:
    """Return whether the beginning of a file has the header of a report."""
    lines = source.head.decode("utf-8-sig", "replace").splitlines()
    return any(_header(line) is not None for line in lines)


def read_reports_of(source: Source) -> Iterator[Report]:
    """Yield the reports of a file. Raises SourceError if one of them is damaged."""
    with source.text() as file:
        sections = [*_sections(file)]
    for first_line, count, (kind, columns) in sections:
        names = [_parsed_column(column)[0] for column in columns]
        units = {name: _UNITS[unit] for name, unit in map(_parsed_column, columns) if unit in _UNITS}
        try:
            with source.text() as file:
                rows = pd.read_csv(
                    file, skiprows=first_line + 1, nrows=count, header=None, names=names, index_col=False,
                    na_values=["None"], low_memory=False,
                )  # fmt: skip
        except (ValueError, pd.errors.EmptyDataError) as error:
            raise source.damaged(error) from None
        yield Report(kind, rows, units)


def _sections(lines: Iterable[str]) -> Iterator[tuple[int, int, tuple[ReportKind, list[str]]]]:
    """Yield the line of each header, the number of rows below it, and what the header says."""
    header, first_line, count = None, 0, 0
    for number, line in enumerate(lines):
        candidate = _header(line)
        if candidate is not None or not line.strip() or line.startswith(_BETWEEN):
            if header is not None:
                yield first_line, count, header
            header, first_line, count = candidate, number, 0
        else:
            count += 1
    if header is not None:
        yield first_line, count, header


def _header(line: str) -> tuple[ReportKind, list[str]] | None:
    """Return the kind of a report and its columns if a line is the header of one."""
    if "Name" not in line or "Start" not in line or "Duration" not in line:
        return None
    columns = next(csv.reader([line.strip()]), [])
    names = {_parsed_column(column)[0] for column in columns}
    kind = next((kind for kind in ReportKind if kind.value <= names), None)
    return None if kind is None else (kind, columns)


def _parsed_column(column: str) -> tuple[str, str]:
    """Return the name of a column and its unit, both in lower case; the unit is empty if none is stated."""
    name, unit = _COLUMN.fullmatch(column).groups("")  # type: ignore[union-attr]
    return name.lower(), unit.lower()
