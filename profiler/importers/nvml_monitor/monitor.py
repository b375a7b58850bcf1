"""Parses a monitor file: of nvidia-smi, DCGM, or scripts with the same figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from ebbtide.profiler.importers.nvml_monitor.columns import (
    DEVICE_FIELDS,
    FIGURES,
    LINK,
    SAMPLED,
    read_devices,
    read_figures,
    row_times,
)
from ebbtide.profiler.importers.nvml_monitor.dcgm import (
    looks_like_dcgmi,
    looks_like_exporter,
    read_dcgmi,
    read_exporter,
)
from ebbtide.profiler.importers.nvml_monitor.dmon import looks_like_dmon, read_dmon
from ebbtide.profiler.importers.nvml_monitor.query import read_query
from ebbtide.profiler.importers.nvml_monitor.table import MonitorTable, Tool, check_text
from ebbtide.profiler.importers.source import Source, SourceError
from ebbtide.profiler.sampler.pcie import link_peak_bytes_per_s


@dataclass(frozen=True)
class Monitor:
    """Contents of one monitor file.

    Attributes:
        source: The file.
        rows: Columns device (int), t_ns, and the figures in bytes, bytes/s, and the units of the table `gpu`; NaN for
            a missing value.
        dated: Whether times are Unix times.
        devices: Entry of each device for the trace's metadata, by number.
        tool: The tool that wrote the file.
        notes: Assumptions and missing figures, one line each.
    """

    source: Source
    rows: pd.DataFrame
    dated: bool
    devices: dict[int, dict[str, Any]]
    tool: Tool
    notes: list[str]

    @property
    def span_ns(self) -> tuple[int, int]:
        """Times of the first and the last row."""
        return int(self.rows["t_ns"].iloc[0]), int(self.rows["t_ns"].iloc[-1])


@dataclass(frozen=True)
class Coverage:
    """Time span and devices that the monitor files of a run cover together.

    Attributes:
        name: Names of the files.
        span_ns: First and last time, Unix ns.
        devices: Numbers of the devices.
    """

    name: str
    span_ns: tuple[int, int]
    devices: frozenset[int]


def parse_monitor(source: Source) -> Monitor:
    """Parse a monitor file. Raise SourceError if it has no header, no times or no figures."""
    table = read_table(source)
    columns = {figure: table.column(names) for figure, names in FIGURES.items()}
    if "pid" in table.names:
        raise SourceError(f"{source} lists processes, not devices: record it with `nvidia-smi dmon`")
    if all(columns[figure] is None for figure in SAMPLED):
        raise SourceError(
            f"{source} has no column of memory, link or state of a GPU: record columns such as memory.used or rxpci"
        )
    notes = list(table.notes)
    figures = read_figures(table, columns, notes)
    if figures[[*SAMPLED]].isna().all(axis=None):
        raise SourceError(
            f"{source} has no value of memory, link or state of a GPU: record columns that the card supports, with "
            "`nvidia-smi dmon -s mt` or `nvidia-smi --query-gpu=timestamp,index,memory.used --format=csv -l 1`"
        )
    figures["device"] = read_devices(table, notes)
    times = row_times(table, figures["device"])
    figures["t_ns"] = times.ns
    valid = figures["t_ns"].notna() & figures["device"].notna() & table.rows[len(table.names)].isna()
    if not valid.any():
        raise SourceError(f"{source} has no row with a time, a device and figures")
    if not valid.all():
        notes.append(f"has rows that cannot be read, which are left out: {int((~valid).sum())}")
    notes += [times.note] if times.note else []
    figures = figures[valid].astype({"t_ns": "int64", "device": "int64"}).sort_values("t_ns", kind="stable")
    if figures["used"].isna().all():
        figures["used"] = figures["total"] - figures["free"]
    if figures[[*LINK]].isna().all(axis=None):
        notes.append(f"has no PCIe figures ({table.tool.link_hint}): link throughput is not known")
    if figures[["used", "processes"]].isna().all(axis=None):
        notes.append("has no memory figures")
    texts = {
        key: table.text(column) for key, names in DEVICE_FIELDS.items() if (column := table.column(names)) is not None
    }
    devices = {int(str(number)): _device_fields(rows, texts) for number, rows in figures.groupby("device")}
    notes = [f"{source.path.name} {note}" for note in notes]
    return Monitor(source, figures, times.dated, devices, table.tool, notes)


def read_table(source: Source) -> MonitorTable:
    """Read a monitor file. Raise SourceError if it has no header, no rows, or is not text."""
    check_text(source)
    if looks_like_exporter(source):
        return read_exporter(source)
    if looks_like_dcgmi(source):
        return read_dcgmi(source)
    return read_dmon(source) if looks_like_dmon(source) else read_query(source)


def read_coverage(sources: Sequence[Source]) -> Coverage | None:
    """Return what monitor files cover together; None if there are none, or if the times of one have no date."""
    monitors = [source.parsed(parse_monitor) for source in sources]
    if not monitors or not all(monitor.dated for monitor in monitors):
        return None
    starts, ends = zip(*(monitor.span_ns for monitor in monitors), strict=True)
    devices = frozenset(number for monitor in monitors for number in monitor.devices)
    return Coverage(", ".join(source.path.name for source in sources), (min(starts), max(ends)), devices)


def _device_fields(rows: pd.DataFrame, texts: dict[str, pd.Series[str]]) -> dict[str, Any]:
    """Return the fields of a device for the trace's metadata."""
    total = rows["total"].max()
    if np.isnan(total):
        total = (rows["used"] + rows["free"]).max()
    generation, width = rows["top_generation"].max(), rows["top_width"].max()
    fields: dict[str, Any] = {"capacity_bytes": None if np.isnan(total) else round(float(total)), "link": None}
    fields.update({key: values.loc[rows.index[0]] for key, values in texts.items()})
    if not np.isnan(generation) and not np.isnan(width):
        peak = link_peak_bytes_per_s(int(generation), int(width))
        fields["link"] = {"generation": int(generation), "width": int(width), "peak_bytes_per_s": peak}
    return fields
