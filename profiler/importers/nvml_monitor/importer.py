"""Adds the figures of monitor files to the ranks to which their devices belong."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from ebbtide.profiler.importers.importer import ImportOptions, Recognition, Stage
from ebbtide.profiler.importers.nvml_monitor.columns import FIGURES, LINK
from ebbtide.profiler.importers.nvml_monitor.monitor import Monitor, parse_monitor
from ebbtide.profiler.importers.nvml_monitor.table import TIME, header_names, looks_like_dmon
from ebbtide.profiler.importers.source import Source, SourceError
from ebbtide.profiler.trace import RankBuilder, TraceBuilder

FORMAT = "nvml-monitor"

# Averaging time of nvmlDeviceGetPcieThroughput, which is the source of the PCIe columns.
_PCIE_WINDOW_NS = 20_000_000


class MonitorImporter:
    """Importer of CSV files with memory and link figures of GPUs."""

    format = FORMAT
    recognition = Recognition.COLUMN_NAMES
    stage = Stage.DEVICES

    def matches(self, source: Source) -> bool:
        figures = {*FIGURES["used"], *FIGURES["free"], *FIGURES["h2d"], *FIGURES["d2h"]}
        return looks_like_dmon(source) or any(names & set(TIME) and names & figures for names in header_names(source))

    def import_into(self, builder: TraceBuilder, sources: Sequence[Source], options: ImportOptions) -> list[Source]:
        monitors = [source.parsed(parse_monitor) for source in sources]
        _refuse_overlaps(monitors)
        _add_monitors(monitors, builder)
        return [monitor.source for monitor in monitors if not monitor.dated]


def _add_monitors(monitors: Sequence[Monitor], builder: TraceBuilder) -> None:
    """Add each device to the rank that owns it: the first rank that names it.

    If no rank names a device, the trace has no job, and each device becomes the rank of its number.
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
                others.append(str(number))
                continue
            entry = builder.rank(owners.get(name, number))
            existing = next((d for d in entry.meta["devices"] if d["device"] == name), None)
            if existing is None:
                entry.meta["devices"].append({"device": name, "kind": "cuda", **fields})
            else:
                existing.update({key: value for key, value in fields.items() if existing.get(key) is None})
            _add_rows(entry, name, monitor.rows[monitor.rows["device"] == number])
        if others:
            name = monitor.source.path.name
            builder.note(f"{name}: devices {', '.join(others)} do not belong to this job and are left out")


def _refuse_overlaps(monitors: Sequence[Monitor]) -> None:
    """Raise SourceError if two files have figures of the same device at the same time."""
    for number, one in enumerate(monitors):
        for other in monitors[:number]:
            figures = [f for f in ("used", *LINK) if one.rows[f].notna().any() and other.rows[f].notna().any()]
            overlapping = one.span_ns[0] <= other.span_ns[1] and other.span_ns[0] <= one.span_ns[1]
            if figures and overlapping and one.devices.keys() & other.devices.keys():
                raise SourceError(
                    f"{other.source} and {one.source} cover the same devices at the same time: import the files of "
                    "each host on their own, then `ebbtide merge` the traces"
                )


def _add_rows(rank: RankBuilder, name: str, rows: pd.DataFrame) -> None:
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
