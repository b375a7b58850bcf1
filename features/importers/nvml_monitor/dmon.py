"""Reads the tables that `nvidia-smi dmon` and queries of nvidia-smi print."""

from __future__ import annotations

import re

import pandas as pd

from ebbtide.features.importers.nvml_monitor.table import (
    MonitorTable,
    Tool,
    first_lines,
    mark_cut_row,
    read_rows,
)
from ebbtide.features.importers.source import Source, SourceError

_HEADER = re.compile(r"#\s*(?:date|time|gpu)\b", re.IGNORECASE)
# The units, for files without the line of units.
_UNITS = {"fb": "mb", "rxpci": "mb/s", "txpci": "mb/s"}
# Names that mean something else in the files of other tools.
_NAMES = {"sm": "utilization.gpu", "mem": "utilization.memory"}
# Averages between two readings of the GPU performance monitor (dmon
# --gpm-metrics=20,21).
_GPM = Tool(link_source="gpm", link_window_ns=None)
# Names of the time column, which every CSV must have.
TIME = ("timestamp", "time", "datetime", "date_time", "_timestamp")
# A row of `nvidia-smi --query-gpu=timestamp,...` whose header was turned off.
_BARE = re.compile(r"\d{4}/\d\d/\d\d \d\d:\d\d:\d\d\.\d{3}[,;]")
_UNIT = re.compile(r"[\d.]{1,20}\s{0,4}([KMG]i?B|B|m?W)(?:/s)?", re.IGNORECASE)
_MAX_UNIT_ROWS = 100


def looks_like_dmon(source: Source) -> bool:
    """Return whether a file has a header of `nvidia-smi dmon` or `pmon`."""
    return any(_HEADER.match(line) for line in first_lines(source))


def read_dmon(source: Source) -> MonitorTable:
    """Read output of `nvidia-smi dmon`.

    Spaces, commas (`--format csv`) or semicolons are between values. Lines with `#` are
    headers, names above units, and recur every few rows.
    """
    headers = [
        line.lstrip("# ").lower()
        for line in first_lines(source)
        if line.startswith("#")
    ]
    separator = next((mark for mark in ",;" if mark in headers[0]), None)
    names, *below = (
        [field.strip() for field in line.split(separator)] for line in headers[:2]
    )
    has_units = below and len(below[0]) == len(names) and below[0] != names
    units = below[0] if has_units else [_UNITS.get(name, "") for name in names]
    rows = read_rows(source, len(names), sep=separator or r"\s+", comment="#")
    mark_cut_row(source, rows, len(names))
    has_gpm = "pcirx" in names and "rxpci" not in names
    return MonitorTable(
        [_NAMES.get(name, name) for name in names],
        [unit.removeprefix("gpm:") for unit in units],
        rows,
        _GPM if has_gpm else Tool(),
    )


def header_names(source: Source) -> list[set[str]]:
    """Return the names in each of the first lines, read as a header. A line that begins
    with a time is a row of a file without a header. It gets the names that the header
    would have."""
    return [
        {*TIME, "memory.used"} if _BARE.match(line) else _names(line)
        for line in first_lines(source)
    ]


def read_query(source: Source) -> MonitorTable:
    """Read a CSV file. Raise SourceError if it has no header with a time, or no
    rows."""
    lines = first_lines(source)
    header = next((n for n, line in enumerate(lines) if _names(line) & set(TIME)), None)
    if header is None:
        raise SourceError(
            f"{source} has no header with a timestamp: record it with --format=csv, "
            "not csv,noheader"
        )
    separator = _separator(lines[header])
    fields = [_name_and_unit(field) for field in lines[header].split(separator)]
    rows = read_rows(
        source, len(fields), sep=separator, skiprows=header + 1, skipinitialspace=True
    )
    # A file that was appended to has its header again.
    time_column = next(n for n, (name, _) in enumerate(fields) if name in TIME)
    rows = rows.loc[
        rows[time_column].fillna("").str.strip(' "').str.lower()
        != fields[time_column][0]
    ].copy()
    mark_cut_row(source, rows, len(fields))
    # Each value has its unit, unless nounits was given: then the header has it.
    units = [unit or _unit_of(rows[column]) for column, (_, unit) in enumerate(fields)]
    return MonitorTable([name for name, _ in fields], units, rows)


def _separator(header: str) -> str:
    """Return what is between the fields of a header.

    Spreadsheets of many countries write semicolons.
    """
    return max(",;", key=header.count)


def _names(header: str) -> set[str]:
    return {_name_and_unit(field)[0] for field in header.split(_separator(header))}


def _name_and_unit(field: str) -> tuple[str, str]:
    """Split a header field such as `memory.used [MiB]` into name and unit."""
    name, _, unit = field.strip(' "#').lower().partition("[")
    return name.strip(), unit.strip(" ]")


def _unit_of(values: pd.Series[str]) -> str:
    matches = (
        _UNIT.fullmatch(value.strip(' "'))
        for value in values.head(_MAX_UNIT_ROWS).dropna()
    )
    return next((match.group(1).lower() for match in matches if match), "")
