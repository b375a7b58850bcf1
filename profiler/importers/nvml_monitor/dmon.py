"""Reads the tables that `nvidia-smi dmon` and `nvidia-smi pmon` print."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pandas as pd

from ebbtide.profiler.importers.nvml_monitor.table import MonitorTable, Tool, first_lines, mark_cut_row, read_rows
from ebbtide.profiler.importers.source import Source, SourceError

_HEADER = re.compile(r"#\s*(?:date|time|gpu)\b", re.IGNORECASE)
# The units, for files without the line of units.
_UNITS = {"fb": "mb", "rxpci": "mb/s", "txpci": "mb/s"}
# Names that mean something else in the files of other tools.
_NAMES = {"sm": "utilization.gpu", "mem": "utilization.memory"}
# Averages between two readings of the GPU performance monitor (dmon --gpm-metrics=20,21).
_GPM = Tool(link_source="gpm", link_window_ns=None)


def looks_like_dmon(source: Source) -> bool:
    """Return whether a file has a header of `nvidia-smi dmon` or `pmon`."""
    return any(_HEADER.match(line) for line in first_lines(source))


def read_dmon(source: Source) -> MonitorTable:
    """Read output of `nvidia-smi dmon` or `pmon`.

    Lines with `#` are headers, names above units, and recur every few rows. Values are separated by spaces, or by
    commas with `--format csv`.

    Raises:
        SourceError: The file has no rows, or lists processes without their memory.
    """
    headers = [line.lstrip("# ").lower() for line in first_lines(source) if line.startswith("#")]
    comma = "," in headers[0]
    names, *below = ([field.strip() for field in (line.split(",") if comma else line.split())] for line in headers[:2])
    has_units = below and len(below[0]) == len(names) and below[0] != names
    units = below[0] if has_units else [_UNITS.get(name, "") for name in names]
    if "pid" in names:
        return _read_processes(source, names, units, comma)
    rows = read_rows(source, len(names), sep="," if comma else r"\s+", comment="#")
    mark_cut_row(source, rows, len(names))
    has_gpm = "pcirx" in names and "rxpci" not in names
    return MonitorTable(
        [_NAMES.get(name, name) for name in names],
        [unit.removeprefix("gpm:") for unit in units],
        rows,
        _GPM if has_gpm else Tool(),
    )


def _read_processes(source: Source, names: list[str], units: list[str], comma: bool) -> MonitorTable:
    """Read the memory of all processes of each device: the sum over the rows of one sample.

    Raises:
        SourceError: The file has no column `fb`, or no rows.
    """
    if "fb" not in names or "gpu" not in names:
        raise SourceError(
            f"{source} lists processes without their memory: record it with `nvidia-smi pmon -s m -o DT`, or record "
            "devices with `nvidia-smi dmon`"
        )
    kept = [name for name in ("date", "time") if name in names]
    rows: list[list[str | None]] = []
    notes: list[str] = []
    for sample in _samples(source, names, comma, notes):
        totals: dict[str, float | None] = {}
        for fields in sample:
            total = totals.get(fields["gpu"], 0.0)
            # A device without a process has one row with `-` in all fields.
            size = 0.0 if fields["pid"] == "-" else _number(fields["fb"])
            totals[fields["gpu"]] = None if total is None or size is None else total + size
        times = [sample[0][name] for name in kept]
        rows += [[*times, gpu, None if total is None else str(total), None] for gpu, total in totals.items()]
    if not rows:
        raise SourceError(f"{source} has a header and no rows")
    notes.insert(0, "lists processes: the sum of their memory on each device is the pool `processes`")
    unit = units[names.index("fb")]
    units = [*("" for _ in kept), "", unit]
    return MonitorTable([*kept, "gpu", "memory.processes"], units, pd.DataFrame(rows), notes=notes)


def _samples(source: Source, names: list[str], comma: bool, notes: list[str]) -> Iterator[list[dict[str, str]]]:
    """Yield the rows of each complete sample, as fields by name. A sample has the devices in order, each process once.

    Args:
        source: The file.
        names: Names of the columns.
        comma: Whether commas separate the fields.
        notes: Receives a line if the last sample is left out because the file was cut off within it.
    """
    sample: list[dict[str, str]] = []
    seen: set[tuple[str, str]] = set()
    cut = False
    with source.text() as file:
        for line in file:
            if line.startswith("#") or not line.strip():
                continue
            # The command is the last column and may contain spaces.
            values = line.split("," if comma else None, len(names) - 1)
            fields = dict(zip(names, (value.strip() for value in values), strict=False))
            cut = len(fields) < len(names)
            key = fields.get("gpu", ""), fields.get("pid", "")
            if not key[0].isdigit():
                continue
            if sample and (key in seen or int(key[0]) < int(sample[-1]["gpu"])):
                yield sample
                sample, seen = [], set()
            if not cut:
                sample.append(fields)
                seen.add(key)
    if cut:
        notes.append("was cut off within its last sample, which is left out")
    elif sample:
        yield sample


def _number(text: str) -> float | None:
    return float(text) if re.fullmatch(r"\d{1,9}(?:\.\d{1,9})?", text) else None
