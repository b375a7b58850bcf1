"""Recognizes the formats of the files of a run, and makes one trace from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ebbtide.profiler.importers.alignment import FileTimes
from ebbtide.profiler.importers.folders import expand_folders
from ebbtide.profiler.importers.importer import Hardware, ImportOptions
from ebbtide.profiler.importers.registry import find_importers
from ebbtide.profiler.importers.source import Source, SourceError
from ebbtide.profiler.sampler.pcie import link_peak_bytes_per_s
from ebbtide.profiler.trace import Trace, TraceBuilder

# Formats whose importers read `ImportOptions.phases`.
_FORMATS_WITH_RANGES = ("nsys", "nsys-csv")


def import_trace(
    paths: Sequence[Path],
    output: Path,
    format: str | None = None,
    force: bool = False,
    hardware: Hardware | None = None,
    align: str | None = None,
    phases: Mapping[str, str] | None = None,
) -> Trace:
    """Write one trace from the files of one run.

    Args:
        paths: The files, or folders of files of one format. Several files must be from one run, on one clock.
        output: Path of the trace.
        format: Format of all files; None: each file is recognized by its contents.
        force: Replace an existing trace.
        hardware: Figures that replace those of the files.
        align: Move the files so that they begin at the same time: with the first one (`start`), or with the file of
            this path. None: their times are used as they are, and must overlap.
        phases: Meanings of NVTX ranges by their names, see `ImportOptions`.

    Returns:
        The trace.

    Raises:
        SourceError: A file cannot be read. Nothing is written.
        TraceError: The output cannot be written.
    """
    importers = find_importers()
    if format is not None and format not in importers:
        raise SourceError(f"{format!r} is not a format: choose one of {', '.join(importers)}")
    sources: dict[str, list[Source]] = {name: [] for name in importers}
    folder_notes: list[str] = []
    files = expand_folders(paths, recognize, format, folder_notes)
    for path in files:
        source = Source(path)
        sources[format or recognize(source)].append(source)
    if phases and not any(sources[name] for name in _FORMATS_WITH_RANGES):
        raise SourceError("--phase assigns NVTX ranges: none of the files is of Nsight Systems")
    builder = TraceBuilder("imported", clock={"name": "unix", "host": None, "wall_offset_ns": 0})
    builder.meta["imported"] = [{"format": name, "file": s.path.name} for name in importers for s in sources[name]]
    for note in folder_notes:
        builder.note(note)
    options = ImportOptions(hardware or Hardware(), sources, phases or {})
    undated: list[Source] = []
    times = FileTimes(builder)
    for importer in sorted(importers.values(), key=lambda importer: importer.stage):
        if sources[importer.format]:
            undated += importer.import_into(builder, sources[importer.format], options)
            times.add(importer.format, sources[importer.format])
    if undated:
        _accept_undated(undated[0], builder, alone=len(undated) == len(files) or align is not None)
    if align is None:
        times.check()
    else:
        times.align(align)
        builder.note("the times of the files are not their own: they were moved so that all files begin at once")
    _apply_hardware(builder, options.hardware)
    _note_missing_hardware(builder)
    return builder.write(output, force)


def recognize(source: Source) -> str:
    """Return the format of a file. Raise SourceError if no importer recognizes it."""
    importers = find_importers()
    for name, importer in importers.items():
        if importer.matches(source):
            return name
    raise SourceError(
        f"{source} has no format that ebbtide recognizes ({', '.join(importers)}): pass --format if it has one of these"
    )


def _accept_undated(source: Source, builder: TraceBuilder, alone: bool) -> None:
    """Mark the clock of the trace as unknown. Raise SourceError if the trace has other files too."""
    if not alone:
        raise SourceError(
            f"{source} has no dates, so it cannot be combined with other files: import it alone, or record dates next "
            "time (nvidia-smi dmon -o DT; `date +%s` before each scrape of dcgm-exporter; the output of a job: "
            "| ts '%Y-%m-%dT%H:%M:%.S'), or pass --align start"
        )
    builder.meta["clock"] = {"name": "unknown", "host": None, "wall_offset_ns": None}


def _apply_hardware(builder: TraceBuilder, hardware: Hardware) -> None:
    for rank in builder.ranks.values():
        devices: list[dict[str, Any]] = rank.meta["devices"]
        for device in devices:
            if hardware.capacity_bytes is not None:
                device["capacity_bytes"] = hardware.capacity_bytes
            if hardware.link is not None:
                generation, width = hardware.link
                peak = link_peak_bytes_per_s(generation, width)
                device["link"] = {"generation": generation, "width": width, "peak_bytes_per_s": peak}


def _note_missing_hardware(builder: TraceBuilder) -> None:
    """Add a note for each figure that neither the files nor the user state."""
    first = next(iter(builder.ranks.values()), None)
    if first is None or not first.meta["devices"]:
        return
    device = first.meta["devices"][0]
    if device.get("capacity_bytes") is None:
        builder.note(
            "the capacity of the device is not known, so free memory cannot be computed: import with --capacity 80GB"
        )
    if not first.frame("link").empty and (device.get("link") or {}).get("peak_bytes_per_s") is None:
        builder.note(
            "the peak rate of the link is not known, so its idle share cannot be computed: import with --link 5x16 "
            "(PCIe generation 5, 16 lanes)"
        )
