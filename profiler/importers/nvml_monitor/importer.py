"""Adds the figures of monitor files to the ranks to which their devices belong."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd

from ebbtide.profiler.importers.importer import ImportOptions, Recognition, Stage
from ebbtide.profiler.importers.nvml_monitor.columns import FIGURES, LINK, SAMPLED, STATE
from ebbtide.profiler.importers.nvml_monitor.dcgm import looks_like_dcgmi, looks_like_exporter
from ebbtide.profiler.importers.nvml_monitor.dmon import looks_like_dmon
from ebbtide.profiler.importers.nvml_monitor.monitor import Monitor, parse_monitor
from ebbtide.profiler.importers.nvml_monitor.query import TIME, header_names
from ebbtide.profiler.importers.nvml_monitor.table import Tool
from ebbtide.profiler.importers.source import Source, SourceError
from ebbtide.profiler.trace import RankBuilder, TraceBuilder

FORMAT = "nvml-monitor"

# Figures of GPUs by which a file is not recognized: files about other things have such columns, too.
_OF_ANYTHING = {"power", "temp", "temperature"}


class MonitorImporter:
    """Importer of files with samples of memory, link and state of GPUs."""

    format = FORMAT
    recognition = Recognition.COLUMN_NAMES
    stage = Stage.DEVICES

    def matches(self, source: Source) -> bool:
        if looks_like_exporter(source) or looks_like_dcgmi(source) or looks_like_dmon(source):
            return True
        names_of_gpus = {name for figure in SAMPLED for name in FIGURES[figure]} - _OF_ANYTHING
        return any(names & set(TIME) and names & names_of_gpus for names in header_names(source))

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
            _add_rows(entry, name, monitor.rows[monitor.rows["device"] == number], monitor.tool)
        if others:
            name = monitor.source.path.name
            builder.note(f"{name}: devices {', '.join(others)} do not belong to this job and are left out")


def _refuse_overlaps(monitors: Sequence[Monitor]) -> None:
    """Raise SourceError if two files have figures of the same device at the same time.

    Figures of the state may be in both, unless one of the files has nothing else to add.
    """
    for number, one in enumerate(monitors):
        for other in monitors[:number]:
            figures, other_figures = _sampled(one), _sampled(other)
            common = figures & other_figures
            repeats = bool(common & {"used", *LINK}) or common in (figures, other_figures)
            overlapping = one.span_ns[0] <= other.span_ns[1] and other.span_ns[0] <= one.span_ns[1]
            if repeats and overlapping and one.devices.keys() & other.devices.keys():
                raise SourceError(
                    f"{other.source} and {one.source} cover the same devices at the same time: import the files of "
                    "each host on their own, then `ebbtide merge` the traces"
                )


def _sampled(monitor: Monitor) -> set[str]:
    return {figure for figure in SAMPLED if monitor.rows[figure].notna().any()}


def _add_rows(rank: RankBuilder, name: str, rows: pd.DataFrame, tool: Tool) -> None:
    for figure, pool in (("used", "device"), ("processes", "processes")):
        used = rows[rows[figure].notna()]
        sizes = used[figure].round().astype("int64").to_numpy()
        rank.extend("memory", t_ns=used["t_ns"].to_numpy(), device=name, pool=pool, bytes=sizes)
    rates = rows[rows[[*LINK]].notna().any(axis=1)]
    times = rates["t_ns"].to_numpy()
    rank.extend(
        "link",
        t_ns=times,
        device=name,
        h2d_bytes_per_s=rates["h2d"].to_numpy(),
        d2h_bytes_per_s=rates["d2h"].to_numpy(),
        source=tool.link_source,
        window_ns=_spacing_ns(times) if tool.link_window_ns is None else tool.link_window_ns,
        generation=rates["generation"].round().astype("Int64").array,
        width=rates["width"].round().astype("Int64").array,
    )
    states = rows[rows[[*STATE]].notna().any(axis=1)]
    values = {column: states[column].to_numpy() for column in STATE if column != "throttle_reasons"}
    reasons = states["throttle_reasons"].astype("Int64").array
    rank.extend("gpu", t_ns=states["t_ns"].to_numpy(), device=name, throttle_reasons=reasons, **values)


def _spacing_ns(times: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the time since the sample before; of the first sample the median, of a single sample 1 s."""
    spacing = np.diff(times)
    first = int(np.median(spacing)) if len(spacing) else 1_000_000_000
    return np.append(first, spacing)[: len(times)]
