"""Adds the figures of monitor files to the ranks to which their devices belong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from ebbtide.features.importers.clocks import jump_notes, mended_times
from ebbtide.features.importers.importer import ImportOptions, Recognition, Stage
from ebbtide.features.importers.nvml_monitor.columns import (
    DEVICE_FIELDS,
    FIGURES,
    LINK,
    SAMPLED,
    STATE,
    read_devices,
    read_figures,
    row_times,
)
from ebbtide.features.importers.nvml_monitor.dcgm import looks_like_dcgmi, read_dcgmi
from ebbtide.features.importers.nvml_monitor.dmon import (
    TIME,
    header_names,
    looks_like_dmon,
    read_dmon,
    read_query,
)
from ebbtide.features.importers.nvml_monitor.table import MonitorTable, Tool, check_text
from ebbtide.features.importers.source import Source, SourceError
from ebbtide.profiler.sampler.pcie import link_peak_bytes_per_s
from ebbtide.profiler.trace import RankBuilder, TraceBuilder
from ebbtide.units import runs_text

FORMAT = "nvml-monitor"

_READERS = (
    (looks_like_dcgmi, read_dcgmi),
    (looks_like_dmon, read_dmon),
)
# Figures of GPUs by which a file is not recognized: files about other things have such
# columns, too.
_OF_ANYTHING = {"power", "temp", "temperature"}


class MonitorImporter:
    """Importer of files with samples of memory, link and state of GPUs."""

    format = FORMAT
    recognition = Recognition.COLUMN_NAMES
    stage = Stage.DEVICES

    def matches(self, source: Source) -> bool:
        if any(looks_like(source) for looks_like, _ in _READERS):
            return True
        names_of_gpus = {
            name for figure in SAMPLED for name in FIGURES[figure]
        } - _OF_ANYTHING
        return any(
            names & set(TIME) and names & names_of_gpus
            for names in header_names(source)
        )

    def import_into(
        self, builder: TraceBuilder, sources: Sequence[Source], options: ImportOptions
    ) -> list[Source]:
        monitors = [source.parsed(parse_monitor) for source in sources]
        _refuse_overlaps(monitors)
        _add_monitors(monitors, builder)
        return [monitor.source for monitor in monitors if not monitor.dated]


def _add_monitors(monitors: Sequence[Monitor], builder: TraceBuilder) -> None:
    """Add each device to the first rank that names it.

    Without a job, each device is the rank of its number.
    """
    owners: dict[str, int] = {}
    for rank, entry in builder.ranks.items():
        for device in entry.meta["devices"]:
            owners.setdefault(device["device"], rank)
    has_job = bool(owners)
    for monitor in monitors:
        for note in monitor.notes:
            builder.note(note)
        others = []
        for number, fields in monitor.devices.items():
            name = f"cuda:{number}"
            if has_job and name not in owners:
                others.append(number)
                continue
            entry = builder.rank(owners.get(name, number))
            existing = next(
                (d for d in entry.meta["devices"] if d["device"] == name), None
            )
            if existing is None:
                entry.meta["devices"].append({"device": name, "kind": "cuda", **fields})
            else:
                existing.update(
                    {
                        key: value
                        for key, value in fields.items()
                        if existing.get(key) is None
                    }
                )
            _add_rows(
                entry,
                name,
                monitor.rows[monitor.rows["device"] == number],
                monitor.tool,
            )
        if others:
            name = monitor.source.path.name
            builder.note(
                f"{name}: device {runs_text(others)} left out, because no rank of the "
                "other files is on it"
            )


def _refuse_overlaps(monitors: Sequence[Monitor]) -> None:
    """Raise SourceError if two files have figures of one device at the same time.

    Files with states alone may overlap.
    """
    for number, one in enumerate(monitors):
        for other in monitors[:number]:
            figures, other_figures = _sampled(one), _sampled(other)
            common = figures & other_figures
            repeats = bool(common & {"used", *LINK}) or common in (
                figures,
                other_figures,
            )
            overlapping = (
                one.span_ns[0] <= other.span_ns[1]
                and other.span_ns[0] <= one.span_ns[1]
            )
            if repeats and overlapping and one.devices.keys() & other.devices.keys():
                raise SourceError(
                    f"{other.source} and {one.source} cover the same devices at the "
                    "same time: import the files of "
                    "each host on their own, then `ebbtide import` the traces"
                )


def _sampled(monitor: Monitor) -> set[str]:
    return {figure for figure in SAMPLED if monitor.rows[figure].notna().any()}


def _add_rows(rank: RankBuilder, name: str, rows: pd.DataFrame, tool: Tool) -> None:
    used = rows[rows["used"].notna()]
    sizes = used["used"].round().astype("int64").to_numpy()
    rank.extend(
        "memory", t_ns=used["t_ns"].to_numpy(), device=name, pool="device", bytes=sizes
    )
    rates = rows[rows[[*LINK]].notna().any(axis=1)]
    times = rates["t_ns"].to_numpy()
    rank.extend(
        "link",
        t_ns=times,
        device=name,
        h2d_bytes_per_s=rates["h2d"].to_numpy(),
        d2h_bytes_per_s=rates["d2h"].to_numpy(),
        source=tool.link_source,
        window_ns=_spacing_ns(times)
        if tool.link_window_ns is None
        else tool.link_window_ns,
        generation=rates["generation"].round().astype("Int64").array,
        width=rates["width"].round().astype("Int64").array,
    )
    states = rows[rows[[*STATE]].notna().any(axis=1)]
    values = {
        column: states[column].to_numpy()
        for column in STATE
        if column != "throttle_reasons"
    }
    reasons = states["throttle_reasons"].astype("Int64").array
    rank.extend(
        "gpu",
        t_ns=states["t_ns"].to_numpy(),
        device=name,
        throttle_reasons=reasons,
        **values,
    )


def _spacing_ns(times: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the time since the sample before.

    For the first sample it is the median, for a single sample 1 s.
    """
    spacing = np.diff(times)
    first = int(np.median(spacing)) if len(spacing) else 1_000_000_000
    return np.append(first, spacing)[: len(times)]


@dataclass(frozen=True)
class Monitor:
    """Contents of one monitor file."""

    source: Source
    # Columns device (int), t_ns, and figures in the units of the trace's tables; NaN
    # for a missing value.
    rows: pd.DataFrame
    dated: bool  # Whether times are Unix times
    devices: dict[int, dict[str, Any]]
    tool: Tool
    notes: list[str]  # Assumptions and missing figures, one line each

    @property
    def span_ns(self) -> tuple[int, int]:
        """Times of the first and the last row."""
        return int(self.rows["t_ns"].iloc[0]), int(self.rows["t_ns"].iloc[-1])


def parse_monitor(source: Source) -> Monitor:
    """Parse a monitor file. Raise SourceError if it has no header, no times or no
    figures."""
    table = read_table(source)
    columns = {figure: table.column(names) for figure, names in FIGURES.items()}
    if "pid" in table.names:
        raise SourceError(
            f"{source} lists processes, not devices: record it with `nvidia-smi dmon`"
        )
    if all(columns[figure] is None for figure in SAMPLED):
        raise SourceError(
            f"{source} has no column of memory, link or state of a GPU: record columns "
            "such as memory.used or rxpci"
        )
    _refuse_commas(source, table, [*columns.values(), table.column(TIME)])
    notes = list(table.notes)
    figures = read_figures(table, columns, notes)
    if figures[[*SAMPLED]].isna().all(axis=None):
        raise SourceError(
            f"{source} has no value of memory, link or state of a GPU: record columns "
            "that the card supports, with "
            "`nvidia-smi dmon -s mt` or `nvidia-smi "
            "--query-gpu=timestamp,index,memory.used --format=csv -l 1`"
        )
    figures["device"] = read_devices(table, notes)
    times = row_times(table, figures["device"])
    figures["t_ns"], jumps = mended_times(times.ns, figures["device"])
    valid = (
        figures["t_ns"].notna()
        & figures["device"].notna()
        & table.rows[len(table.names)].isna()
    )
    if not valid.any():
        longer = table.rows[len(table.names)].notna().all()
        cause = ": rows have more fields than the header (commas in numbers?)"
        raise SourceError(
            f"{source} has no row with a time, a device and figures"
            f"{cause if longer else ''}"
        )
    if not valid.all():
        notes.append(
            f"has rows that cannot be read, which are left out: {int((~valid).sum())}"
        )
    notes += [times.note] if times.note else []
    notes += jump_notes(jumps)
    figures = (
        figures[valid]
        .astype({"t_ns": "int64", "device": "int64"})
        .sort_values("t_ns", kind="stable")
    )
    if figures["used"].isna().all():
        figures["used"] = figures["total"] - figures["free"]
    if figures[[*LINK]].isna().all(axis=None):
        notes.append(
            f"has no PCIe figures ({table.tool.link_hint}): link throughput is not "
            "known"
        )
    if figures["used"].isna().all():
        notes.append("has no memory figures")
    texts = {
        key: table.text(column)
        for key, names in DEVICE_FIELDS.items()
        if (column := table.column(names)) is not None
    }
    devices = {
        int(str(number)): _device_fields(rows, texts)
        for number, rows in figures.groupby("device")
    }
    notes = [f"{source.path.name} {note}" for note in notes]
    return Monitor(source, figures, times.dated, devices, table.tool, notes)


def _refuse_commas(
    source: Source, table: MonitorTable, columns: Sequence[int | None]
) -> None:
    for column in columns:
        if column is not None and len(
            values := table.rows[column][table.text(column).str.contains(r"\d,\d")]
        ):
            example = f"{table.names[column]}: {values.iloc[0].strip()}"
            raise SourceError(
                f"{source} has commas in numbers ({example}): save it with decimal "
                "points"
            )


def read_table(source: Source) -> MonitorTable:
    """Read a monitor file. Raise SourceError if it has no header, no rows, or is not
    text."""
    check_text(source)
    return next(
        (read for looks_like, read in _READERS if looks_like(source)), read_query
    )(source)


def _device_fields(
    rows: pd.DataFrame, texts: dict[str, pd.Series[str]]
) -> dict[str, Any]:
    """Return the fields of a device for the trace's metadata."""
    total = rows["total"].max()
    if np.isnan(total):
        total = (rows["used"] + rows["free"]).max()
    generation, width = rows["top_generation"].max(), rows["top_width"].max()
    fields: dict[str, Any] = {
        "capacity_bytes": None if np.isnan(total) else round(float(total)),
        "link": None,
    }
    fields.update({key: values.loc[rows.index[0]] for key, values in texts.items()})
    if not np.isnan(generation) and not np.isnan(width):
        peak = link_peak_bytes_per_s(int(generation), int(width))
        fields["link"] = {
            "generation": int(generation),
            "width": int(width),
            "peak_bytes_per_s": peak,
        }
    return fields
