"""Recognizes the formats of the files of a run, and makes one trace from them."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from ebbtide import seams
from ebbtide.features.importers.importer import (
    Hardware,
    Importer,
    ImportOptions,
    Stage,
)
from ebbtide.features.importers.other_kinds import other_kind
from ebbtide.features.importers.source import Source, SourceError, members_of
from ebbtide.profiler.sampler.pcie import link_peak_bytes_per_s
from ebbtide.profiler.trace import RankBuilder, Trace, TraceBuilder
from ebbtide.profiler.trace.merge import refuse_gaps
from ebbtide.units import bytes_text, counted

_MAX_NAMES = 4
# Files of an archive among which the one to import is looked for.
_MAX_RECOGNIZED = 100
# Names that torch.profiler's tensorboard_trace_handler gives: host and process, time.
_STEPS_OF_WORKER = re.compile(r"(.{1,250})\.\d{10,20}\.pt\.trace\.json(?:\.gz)?")
# The format whose importer reads `ImportOptions.phases`.
_FORMAT_WITH_RANGES = "nsys"
# Value of `--align` with which all files begin with the first one.
START = "start"
_SPAN_COLUMNS = ("start_ns", "end_ns", "t_ns")
_META_TIMES = ("first_iteration_start_ns", "started_ns")


def expand_folders(
    paths: Sequence[Path],
    recognize: Callable[[Source], str],
    format: str | None,
    notes: list[str],
) -> list[Path]:
    """Replace folders by their files of one format, hidden ones left out.

    The format is `format`, else the format of most files; they are in the order of the
    numbers in their names. `notes` receives a line for each folder with other files.
    """
    files: list[Path] = []
    for path in paths:
        files += _files_of(path, recognize, format, notes) if path.is_dir() else [path]
    return files


def _files_of(
    folder: Path,
    recognize: Callable[[Source], str],
    format: str | None,
    notes: list[str],
) -> list[Path]:
    try:
        entries = sorted(
            (p for p in folder.iterdir() if not p.name.startswith(".")), key=_by_number
        )
    except OSError as error:
        raise SourceError(f"{folder} cannot be read: {error.strerror}") from None
    if any(entry.name == "meta.json" for entry in entries):
        raise SourceError(
            f"{folder} is a trace already: import the files first, then merge traces"
        )
    by_format: dict[str, list[Path]] = {}
    ignored = []
    for entry in entries:
        name = _format_of(entry, recognize)
        if name is None or (format is not None and name != format):
            ignored.append(entry)
        else:
            by_format.setdefault(name, []).append(entry)
    if not by_format:
        of_format = f" of the format {format}" if format is not None else ""
        raise SourceError(
            f"{folder} has no file{of_format} to import: it contains "
            f"{_names(entries) or 'nothing'}"
        )
    chosen = max(by_format, key=lambda name: len(by_format[name]))
    ignored += [
        entry
        for name, entries in by_format.items()
        if name != chosen
        for entry in entries
    ]
    if ignored:
        notes.append(
            f"{folder.name}: the {len(by_format[chosen])} files of the format {chosen} "
            "are imported; name others to "
            f"import them, too: {_names(ignored)}"
        )
    _refuse_several_steps(folder, by_format[chosen])
    return by_format[chosen]


def _refuse_several_steps(folder: Path, files: Sequence[Path]) -> None:
    """Raise SourceError if a process has several files. Between them are steps that
    were not recorded."""
    by_worker: dict[str, list[Path]] = {}
    for path in files:
        if match := _STEPS_OF_WORKER.fullmatch(path.name):
            by_worker.setdefault(match.group(1), []).append(path)
    worker, several = max(
        by_worker.items(), key=lambda item: len(item[1]), default=("", [])
    )
    if len(several) > 1:
        raise SourceError(
            f"{folder} has {len(several)} files of the process {worker}, one per cycle "
            "of the profiler's schedule: "
            f"import one file of each process, by name: {_names(several)}"
        )


def _format_of(path: Path, recognize: Callable[[Source], str]) -> str | None:
    if not path.is_file():
        return None
    try:
        return recognize(Source(path))
    except SourceError:
        return None


def _names(paths: Sequence[Path]) -> str:
    names = [path.name for path in paths[:_MAX_NAMES]]
    return ", ".join(names) + (
        f" and {len(paths) - _MAX_NAMES} more" if len(paths) > _MAX_NAMES else ""
    )


def _by_number(path: Path) -> list[tuple[int, str]]:
    """Return a key that sorts `rank-2` before `rank-10`."""
    return [
        (int(part), "") if part.isdigit() else (-1, part)
        for part in re.split(r"(\d{1,18})", path.name)
    ]


def import_trace(
    paths: Sequence[Path],
    output: Path,
    format: str | None = None,
    force: bool = False,
    hardware: Hardware | None = None,
    align: str | None = None,
    phases: Mapping[str, str] | None = None,
    jobs: int = 1,
    run: int | Literal["all"] | None = None,
    scheduler: str | None = None,
) -> Trace:
    """Write one trace from the files of one run, on one clock.

    Folders of files of one format may be given, too. `format` None: each file is
    recognized by its contents; `hardware` replaces figures of the files. `align` moves
    the files so that they begin at the same time: with the first one (`start`), or with
    the file of this path; None: their times must overlap. `phases`, `jobs`, `run`,
    `scheduler`: see `ImportOptions`. Raises SourceError if a file cannot be read,
    TraceError if the output cannot be written.
    """
    importers = find_importers()
    if format is not None and format not in importers:
        raise SourceError(
            f"{format!r} is not a format: choose one of {', '.join(importers)}"
        )
    sources: dict[str, list[Source]] = {name: [] for name in importers}
    folder_notes: list[str] = []
    files = expand_folders(paths, recognize, format, folder_notes)
    for path in files:
        source = _open(path, format)
        sources[format or recognize(source)].append(source)
    if phases and not sources[_FORMAT_WITH_RANGES]:
        raise SourceError(
            "--phase assigns NVTX ranges: none of the files is of Nsight Systems"
        )
    if run is not None and not any(
        sources[name] for name, own in importers.items() if own.stage == Stage.JOB
    ):
        raise SourceError("--run chooses a run of a log: none of the files is one")
    builder = TraceBuilder(
        "imported", clock={"name": "unix", "host": None, "wall_offset_ns": 0}
    )
    builder.meta["imported"] = [
        {"format": name, "file": s.path.name}
        for name in importers
        for s in sources[name]
    ]
    for note in folder_notes:
        builder.note(note)
    options = ImportOptions(
        hardware or Hardware(),
        sources,
        phases or {},
        run=run,
        jobs=jobs,
        scheduler=scheduler,
    )
    undated: list[Source] = []
    times = FileTimes(builder)
    for importer in sorted(importers.values(), key=lambda importer: importer.stage):
        if sources[importer.format]:
            undated += importer.import_into(builder, sources[importer.format], options)
            times.add(importer.format, sources[importer.format])
    if undated:
        _accept_undated(
            undated[0], builder, alone=len(undated) == len(files) or align is not None
        )
    if align is None:
        times.check()
    else:
        times.align(align)
        builder.note(
            "the times of the files are not their own: they were moved so that all "
            "files begin at once"
        )
    _apply_hardware(builder, options.hardware)
    _note_missing_hardware(builder)
    names = {source.path.name for own in sources.values() for source in own}
    builder.meta["notes"] = joined_notes(builder.meta["notes"], names)
    return builder.write(output, force)


def _open(path: Path, format: str | None) -> Source:
    """Open a file; of an archive the one file in it that can be imported."""
    members = members_of(path)
    if len(members) < 2:
        return Source(path)
    own = [
        source
        for member in members[:_MAX_RECOGNIZED]
        if (source := _recognized(path, member, format)) is not None
    ]
    if len(own) != 1:
        raise SourceError(
            f"{path} has {len(own)} files to import among {len(members):,}: unpack it, "
            "and name those of one run"
        )
    return own[0]


def _recognized(path: Path, member: str, format: str | None) -> Source | None:
    try:
        source = Source(path, member)
        return source if format in (None, recognize(source)) else None
    except SourceError:
        return None


def joined_notes(notes: Sequence[str], names: Collection[str]) -> list[str]:
    """Return each note that begins with the name of a file once, with the number of the
    files that have it."""
    begins = re.compile("|".join(map(re.escape, names)))
    groups: dict[str, list[str]] = {}
    for note in notes:
        match = begins.match(note)
        name = match[0] if match else ""
        groups.setdefault(note[len(name) :], []).append(name)
    joined = []
    for text, files in groups.items():
        others = f" and {counted(len(files) - 1, 'more file')}" if files[1:] else ""
        joined.append(f"{files[0]}{others}{text}")
    return joined


def recognize(source: Source) -> str:
    """Return the format of a file. Raise SourceError if no importer recognizes it."""
    importers = find_importers()
    for name, importer in importers.items():
        if importer.matches(source):
            return name
    if (kind := other_kind(source)) is not None:
        raise SourceError(
            f"{source} is {kind.name}, which has too little for a trace: "
            f"{kind.remedy}; `ebbtide explain` reads what it has"
        )
    raise SourceError(
        f"{source} has no format that ebbtide recognizes ({', '.join(importers)}): "
        "pass --format if it has one of these; `ebbtide explain` reads messages, other "
        "logs and tables"
    )


def _accept_undated(source: Source, builder: TraceBuilder, alone: bool) -> None:
    """Mark the clock of the trace as unknown. Raise SourceError if the trace has other
    files too."""
    if not alone:
        raise SourceError(
            f"{source} has no dates, so it cannot be combined with other files: import "
            "it alone, or record dates next "
            "time (nvidia-smi dmon -o DT; other tools and the job: | ts "
            "'%Y-%m-%dT%H:%M:%.S'), or pass --align start"
        )
    builder.meta["clock"] = {"name": "unknown", "host": None, "wall_offset_ns": None}


def _apply_hardware(builder: TraceBuilder, hardware: Hardware) -> None:
    for rank in builder.ranks.values():
        devices: list[dict[str, Any]] = rank.meta["devices"]
        for device in devices:
            if hardware.capacity_bytes is not None:
                _check_capacity(builder, rank, device, hardware.capacity_bytes)
                device["capacity_bytes"] = hardware.capacity_bytes
            if hardware.link is not None:
                generation, width = hardware.link
                peak, stated = (
                    link_peak_bytes_per_s(generation, width),
                    device.get("link"),
                )
                if (
                    stated
                    and (own := (stated["generation"], stated["width"]))
                    != hardware.link
                ):
                    builder.note(
                        "--link {}x{} replaces the {}x{} that the files state".format(
                            *hardware.link, *own
                        )
                    )
                device["link"] = {
                    "generation": generation,
                    "width": width,
                    "peak_bytes_per_s": peak,
                }


def _check_capacity(
    builder: TraceBuilder, rank: RankBuilder, device: dict[str, Any], capacity: int
) -> None:
    """Raise SourceError if a device had more in use than the user states.

    Note if the files state another size.
    """
    stated, name, memory = (
        device.get("capacity_bytes"),
        device["device"],
        rank.frame("memory"),
    )
    if (used := memory.loc[memory["device"] == name, "bytes"].max()) > capacity:
        raise SourceError(
            f"--capacity {bytes_text(capacity)} is less than the {bytes_text(used)} "
            f"that were in use on {name}: a size "
            "without a unit is in bytes, so write it like 80GB"
        )
    if stated not in (None, capacity):
        builder.note(
            f"--capacity {bytes_text(capacity)} replaces the {bytes_text(stated)} that "
            "the files state"
        )


def _note_missing_hardware(builder: TraceBuilder) -> None:
    """Add a note for each figure that neither the files nor the user state."""
    first = next(iter(builder.ranks.values()), None)
    if first is None or not first.meta["devices"]:
        return
    device = first.meta["devices"][0]
    if device.get("capacity_bytes") is None:
        builder.note(
            "the capacity of the device is not known, so free memory cannot be "
            "computed: import with --capacity 80GB"
        )
    if (
        not first.frame("link").empty
        and (device.get("link") or {}).get("peak_bytes_per_s") is None
    ):
        builder.note(
            "the peak rate of the link is not known, so its idle share cannot be "
            "computed: import with --link 5x16 "
            "(PCIe generation 5, 16 lanes)"
        )


@cache
def find_importers() -> dict[str, Importer]:
    """Return all importers by the name of their format, in the order in which they are
    asked to recognize a file."""
    listed = chain.from_iterable(seams.load_all("importers"))
    return {
        importer.format: importer
        for importer in sorted(listed, key=lambda importer: importer.recognition)
    }


@dataclass(frozen=True)
class _Addition:
    """The rows that one file added to a rank; `parts`: rows, and columns of rows."""

    path: Path
    entry: RankBuilder
    parts: list[dict[str, Any]]
    meta_times: list[str]

    def span_ns(self) -> tuple[int, int] | None:
        """Return the first and last time of the rows; None if there are none."""
        columns = (
            pd.Series(part[name]).dropna()
            for part in self.parts
            for name in _SPAN_COLUMNS
            if name in part
        )
        spans = [
            (int(times.min()), int(times.max())) for times in columns if times.size
        ]
        return (
            (min(first for first, _ in spans), max(last for _, last in spans))
            if spans
            else None
        )

    def shift(self, offset_ns: int) -> None:
        """Move the rows in time."""
        for part in self.parts:
            for column, values in part.items():
                # Not a time: the length of a sample's window.
                if (
                    column.endswith("_ns")
                    and column != "window_ns"
                    and values is not None
                ):
                    part[column] = values + offset_ns
        for name in self.meta_times:
            self.entry.meta[name] += offset_ns


class FileTimes:
    """Records which file added which rows to a trace."""

    def __init__(self, builder: TraceBuilder) -> None:
        self._builder = builder
        self._additions: list[_Addition] = []
        self._known_parts: set[int] = set()
        self._known_meta: dict[int, set[str]] = {}

    def add(self, format: str, sources: Sequence[Source]) -> None:
        """Record what the importer of a format has just added from its files."""
        for rank, entry in self._builder.ranks.items():
            parts = [
                part for part in entry.parts() if id(part) not in self._known_parts
            ]
            self._known_parts.update(map(id, parts))
            names = {name for name in _META_TIMES if entry.meta.get(name) is not None}
            new_names = names - self._known_meta.get(rank, set())
            self._known_meta[rank] = names
            if parts:
                self._additions.append(
                    _Addition(
                        _source_of(entry, format, sources),
                        entry,
                        parts,
                        sorted(new_names),
                    )
                )

    def check(self) -> None:
        """Raise SourceError if some files share no time with the others."""
        spans = [
            (*span, addition.path)
            for addition in self._additions
            if (span := addition.span_ns()) is not None
        ]
        refuse_gaps(spans, SourceError)

    def align(self, reference: str) -> None:
        """Move all files so that they begin with a reference: START, or the path of a
        file."""
        begins: dict[Path, int] = {}
        for addition in self._additions:
            span = addition.span_ns()
            if span is not None:
                begins[addition.path] = min(span[0], begins.get(addition.path, span[0]))
        chosen = next(iter(begins), None) if reference == START else Path(reference)
        if chosen is not None and chosen not in begins:
            raise SourceError(f"--align {reference}: name one of the files, or {START}")
        for addition in self._additions:
            if chosen is not None and addition.path in begins:
                addition.shift(begins[chosen] - begins[addition.path])


def _source_of(entry: RankBuilder, format: str, sources: Sequence[Source]) -> Path:
    """Return the first file of a format that a rank was imported from."""
    names = {
        entry.meta.get("imported_from"),
        entry.meta.get("imported", {}).get(format),
    }
    return next(
        (source.path for source in sources if source.path.name in names),
        sources[0].path,
    )
