"""Which format a file has, and one trace from all the files of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ebbtide.profiler.importers.deepspeed import importer as deepspeed_log
from ebbtide.profiler.importers.kineto import importer as kineto
from ebbtide.profiler.importers.nvml_monitor import importer as monitor
from ebbtide.profiler.importers.source import Source, SourceError
from ebbtide.profiler.importers.torch_memory import snapshot
from ebbtide.profiler.importers.torch_memory import timeline as memory_timeline
from ebbtide.profiler.sampler.nvml import link_peak_bytes_per_s
from ebbtide.profiler.trace import Trace, TraceBuilder

# In the order in which they are asked whether a file is theirs: the strictest first.
FORMATS: dict[str, Callable[[Source], bool]] = {
    snapshot.FORMAT: snapshot.matches,
    memory_timeline.FORMAT: memory_timeline.matches,
    kineto.FORMAT: kineto.matches,
    monitor.FORMAT: monitor.matches,
    deepspeed_log.FORMAT: deepspeed_log.matches,
}


@dataclass(frozen=True)
class Hardware:
    """What the files do not tell and the user knows: the memory of a device, and its link (generation, width)."""

    capacity_bytes: int | None = None
    link: tuple[int, int] | None = None


def import_trace(
    paths: Sequence[Path],
    output: Path,
    format: str | None = None,
    force: bool = False,
    hardware: Hardware | None = None,
) -> Trace:
    """Write one trace from the files of one run. Several files must be of one run, on one clock.

    format: a key of FORMATS for all the files; None: each is recognised by what it holds. Raises SourceError for files
    that cannot be read, TraceError where the output cannot be written; nothing is left behind then.
    """
    if format is not None and format not in FORMATS:
        raise SourceError(f"{format!r} is not a format: choose one of {', '.join(FORMATS)}")
    sources: dict[str, list[Source]] = {name: [] for name in FORMATS}
    for path in paths:
        source = Source(path)
        sources[format or recognise(source)].append(source)
    builder = TraceBuilder("imported", clock={"name": "unix", "host": None, "wall_offset_ns": 0})
    builder.meta["imported"] = [{"format": name, "file": s.path.name} for name in FORMATS for s in sources[name]]
    if len(sources[deepspeed_log.FORMAT]) > 1:
        raise SourceError("two DeepSpeed logs cannot make one trace: import each for itself, then `ebbtide merge`")
    monitors = [monitor.parse(source) for source in sources[monitor.FORMAT]]
    undated = [found.source for found in monitors if not found.dated]
    for source in sources[deepspeed_log.FORMAT]:
        if not deepspeed_log.read(source, builder, None if undated else monitor.coverage(monitors)):
            undated.append(source)
    for number, source in enumerate(sources[kineto.FORMAT]):
        kineto.read(source, builder, number)
    for number, source in enumerate(sources[snapshot.FORMAT]):
        snapshot.read(source, builder, number)
    for number, source in enumerate(sources[memory_timeline.FORMAT]):
        memory_timeline.read(source, builder, number)
    monitor.add(monitors, builder)
    if undated:
        _undated(undated[0], builder, alone=len(undated) == len(paths))
    _complete(builder, hardware or Hardware())
    return builder.write(output, force)


def recognise(source: Source) -> str:
    """The format of a file. Raises SourceError for one that is of no known format."""
    for name, matches in FORMATS.items():
        if matches(source):
            return name
    raise SourceError(
        f"{source} is of no format that ebbtide knows ({', '.join(FORMATS)}): name one with --format if it is"
    )


def _undated(source: Source, builder: TraceBuilder, alone: bool) -> None:
    """Times that are of no known day make a trace, which no other can be put beside."""
    if not alone:
        raise SourceError(
            f"{source} has no dates, so it cannot be put beside other files: import it for itself, and next time "
            "record with them (nvidia-smi dmon -o DT; the output of a job: | ts '%Y-%m-%dT%H:%M:%.S')"
        )
    builder.meta["clock"] = {"name": "unknown", "host": None, "wall_offset_ns": None}


def _complete(builder: TraceBuilder, hardware: Hardware) -> None:
    """Add what the user knows, and say what nobody does."""
    for rank in builder.ranks.values():
        devices: list[dict[str, Any]] = rank.meta["devices"]
        for device in devices:
            if hardware.capacity_bytes is not None:
                device["capacity_bytes"] = hardware.capacity_bytes
            if hardware.link is not None:
                generation, width = hardware.link
                peak = link_peak_bytes_per_s(generation, width)
                device["link"] = {"generation": generation, "width": width, "peak_bytes_per_s": peak}
    first = next(iter(builder.ranks.values()), None)
    if first is None or not first.meta["devices"]:
        return
    device = first.meta["devices"][0]
    if device.get("capacity_bytes") is None:
        builder.note(
            "the memory of the device is not known, so nothing can be called free: import with --capacity 80GB"
        )
    if not first.frame("link").empty and (device.get("link") or {}).get("peak_bytes_per_s") is None:
        builder.note(
            "the peak of the link is not known, so how idle it is cannot be told: import with --link 5x16 (PCIe "
            "generation 5, 16 lanes)"
        )
