"""Monitor files of NVML: CSV of `nvidia-smi --query-gpu`, `nvidia-smi dmon`, and of scripts with the same figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from ebbtide.profiler.importers.nvml_monitor.columns import FACTS, FIGURES, LINK, read_devices, read_figures, row_times
from ebbtide.profiler.importers.nvml_monitor.table import TIME, header_names, looks_like_dmon, read_table
from ebbtide.profiler.importers.source import Source, SourceError
from ebbtide.profiler.sampler.nvml import link_peak_bytes_per_s
from ebbtide.profiler.trace import RankBuilder, TraceBuilder

FORMAT = "nvml-monitor"

# nvmlDeviceGetPcieThroughput, which is behind such columns, counts over this long.
_PCIE_WINDOW_NS = 20_000_000


@dataclass(frozen=True)
class Monitor:
    """What one file tells. rows: device (int), t_ns, and the figures (bytes and bytes/s), NaN where a value is missing.
    dated: whether times are Unix times. devices: the facts of each device."""

    source: Source
    rows: pd.DataFrame
    dated: bool
    devices: dict[int, dict[str, Any]]
    notes: list[str]

    @property
    def span_ns(self) -> tuple[int, int]:
        return int(self.rows["t_ns"].iloc[0]), int(self.rows["t_ns"].iloc[-1])


@dataclass(frozen=True)
class Coverage:
    """What monitor files cover together: from when to when (Unix ns), and which devices."""

    name: str
    span_ns: tuple[int, int]
    devices: frozenset[int]


def matches(source: Source) -> bool:
    figures = {*FIGURES["used"], *FIGURES["free"], *FIGURES["h2d"], *FIGURES["d2h"]}
    return looks_like_dmon(source) or any(names & set(TIME) and names & figures for names in header_names(source))


def parse(source: Source) -> Monitor:
    """Read a monitor file. Raises SourceError where it has no header, no times or no figures."""
    table = read_table(source)
    columns = {meaning: table.column(names) for meaning, names in FIGURES.items()}
    if "pid" in table.names:
        raise SourceError(f"{source} tells of processes, not of devices: record it with `nvidia-smi dmon`")
    if all(columns[meaning] is None for meaning in ("used", "free", *LINK)):
        raise SourceError(f"{source} tells neither memory nor link: it needs a column like memory.used or rxpci")
    notes: list[str] = []
    figures = read_figures(table, columns, notes)
    figures["device"] = read_devices(table, notes)
    times = row_times(table, figures["device"])
    figures["t_ns"] = times.ns
    known = figures["t_ns"].notna() & figures["device"].notna() & table.rows[len(table.names)].isna()
    if not known.any():
        raise SourceError(f"{source} has no row with a time, a device and figures")
    if not known.all():
        notes.append(f"has rows that cannot be read, which are left out: {int((~known).sum())}")
    notes += [times.note] if times.note else []
    figures = figures[known].astype({"t_ns": "int64", "device": "int64"}).sort_values("t_ns", kind="stable")
    if figures["used"].isna().all():
        figures["used"] = figures["total"] - figures["free"]
    if figures[[*LINK]].isna().all(axis=None):
        notes.append("has no PCIe figures (nvidia-smi dmon -s t has them): the link is not known")
    if figures["used"].isna().all():
        notes.append("has no memory figures")
    texts = {key: table.text(column) for key, names in FACTS.items() if (column := table.column(names)) is not None}
    devices = {int(str(number)): _facts(rows, texts) for number, rows in figures.groupby("device")}
    return Monitor(source, figures, times.dated, devices, [f"{source.path.name} {note}" for note in notes])


def coverage(monitors: Sequence[Monitor]) -> Coverage | None:
    if not monitors:
        return None
    starts, ends = zip(*(monitor.span_ns for monitor in monitors), strict=True)
    devices = frozenset(number for monitor in monitors for number in monitor.devices)
    return Coverage(", ".join(monitor.source.path.name for monitor in monitors), (min(starts), max(ends)), devices)


def add(monitors: Sequence[Monitor], builder: TraceBuilder) -> None:
    """Put the lines of each device to the rank that it belongs to: the first that names it, else rank = device.

    Raises SourceError where two files tell of the same device at the same time.
    """
    owners: dict[str, int] = {}
    for rank, entry in builder.ranks.items():
        for device in entry.meta["devices"]:
            owners.setdefault(device["device"], rank)
    jobs = bool(owners)
    _refuse_two(monitors)
    for monitor in monitors:
        for note in monitor.notes:
            builder.note(note)
        others = []
        for number, facts in monitor.devices.items():
            name = f"cuda:{number}"
            if jobs and name not in owners:
                others.append(str(number))
                continue
            entry = builder.rank(owners.get(name, number))
            known = next((d for d in entry.meta["devices"] if d["device"] == name), None)
            if known is None:
                entry.meta["devices"].append({"device": name, "kind": "cuda", **facts})
            else:
                known.update({key: value for key, value in facts.items() if known.get(key) is None})
            _lines(entry, name, monitor.rows[monitor.rows["device"] == number])
        if others:
            builder.note(f"{monitor.source.path.name}: devices {', '.join(others)} are not of this job and left out")


def _refuse_two(monitors: Sequence[Monitor]) -> None:
    for number, one in enumerate(monitors):
        for other in monitors[:number]:
            figures = [f for f in ("used", *LINK) if one.rows[f].notna().any() and other.rows[f].notna().any()]
            meet = one.span_ns[0] <= other.span_ns[1] and other.span_ns[0] <= one.span_ns[1]
            if figures and meet and one.devices.keys() & other.devices.keys():
                raise SourceError(
                    f"{other.source} and {one.source} tell of the same devices at the same time: import those of one "
                    "host, then the others, and `ebbtide merge` the traces"
                )


def _lines(rank: RankBuilder, name: str, rows: pd.DataFrame) -> None:
    used = rows[rows["used"].notna()]
    sizes = used["used"].round().astype("int64").to_numpy()
    rank.extend("memory", t_ns=used["t_ns"].to_numpy(), device=name, pool="device", bytes=sizes)
    rates = rows[rows[[*LINK]].notna().any(axis=1)]
    rank.extend(
        "link",
        t_ns=rates["t_ns"].to_numpy(),
        device=name,
        h2d_bytes_per_s=rates["h2d"].to_numpy(),
        d2h_bytes_per_s=rates["d2h"].to_numpy(),
        source="nvml-throughput",
        window_ns=_PCIE_WINDOW_NS,
        generation=rates["generation"].round().astype("Int64").array,
        width=rates["width"].round().astype("Int64").array,
    )


def _facts(rows: pd.DataFrame, texts: dict[str, pd.Series[str]]) -> dict[str, Any]:
    """A device's entry of the trace's meta."""
    total = rows["total"].max()
    if np.isnan(total):
        total = (rows["used"] + rows["free"]).max()
    generation, width = rows["top_generation"].max(), rows["top_width"].max()
    facts: dict[str, Any] = {"capacity_bytes": None if np.isnan(total) else round(float(total)), "link": None}
    facts.update({key: values.loc[rows.index[0]] for key, values in texts.items()})
    if not np.isnan(generation) and not np.isnan(width):
        peak = link_peak_bytes_per_s(int(generation), int(width))
        facts["link"] = {"generation": int(generation), "width": int(width), "peak_bytes_per_s": peak}
    return facts
