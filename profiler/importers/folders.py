"""Finds the files to import in a folder, such as the traces of all ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from ebbtide.profiler.importers.source import Source, SourceError

_MAX_NAMES = 4
# Names that torch.profiler's tensorboard_trace_handler gives: host and process, time.
_STEPS_OF_WORKER = re.compile(r"(.{1,250})\.\d{10,20}\.pt\.trace\.json(?:\.gz)?")


def expand_folders(
    paths: Sequence[Path], recognize: Callable[[Source], str], format: str | None, notes: list[str]
) -> list[Path]:
    """Replace folders by the files in them.

    Of each folder, the files of one format are taken: `format`, else the format that most of its files have. Hidden
    files and folders in it are ignored.

    Args:
        paths: Files and folders.
        recognize: Returns the format of a file; raises SourceError if it has none.
        format: Format of all files; None: each file is recognized by its contents.
        notes: Receives a line for each folder with other files.

    Returns:
        The files, those of a folder in the order of the numbers in their names.

    Raises:
        SourceError: A folder has no file to import, several files of one process, or is a trace.
    """
    files: list[Path] = []
    for path in paths:
        files += _files_of(path, recognize, format, notes) if path.is_dir() else [path]
    return files


def _files_of(folder: Path, recognize: Callable[[Source], str], format: str | None, notes: list[str]) -> list[Path]:
    try:
        entries = sorted((p for p in folder.iterdir() if not p.name.startswith(".")), key=_by_number)
    except OSError as error:
        raise SourceError(f"{folder} cannot be read: {error.strerror}") from None
    if any(entry.name == "meta.json" for entry in entries):
        raise SourceError(f"{folder} is a trace already: open it with `ebbtide summary`")
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
        raise SourceError(f"{folder} has no file{of_format} to import: it contains {_names(entries) or 'nothing'}")
    chosen = max(by_format, key=lambda name: len(by_format[name]))
    ignored += [entry for name, entries in by_format.items() if name != chosen for entry in entries]
    if ignored:
        notes.append(
            f"{folder.name}: the {len(by_format[chosen])} files of the format {chosen} are imported; name others to "
            f"import them, too: {_names(ignored)}"
        )
    _refuse_several_steps(folder, by_format[chosen])
    return by_format[chosen]


def _refuse_several_steps(folder: Path, files: Sequence[Path]) -> None:
    """Raise SourceError if a process has several files. Between them are steps that were not recorded."""
    by_worker: dict[str, list[Path]] = {}
    for path in files:
        if match := _STEPS_OF_WORKER.fullmatch(path.name):
            by_worker.setdefault(match.group(1), []).append(path)
    worker, several = max(by_worker.items(), key=lambda item: len(item[1]), default=("", []))
    if len(several) > 1:
        raise SourceError(
            f"{folder} has {len(several)} files of the process {worker}, one per cycle of the profiler's schedule: "
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
    return ", ".join(names) + (f" and {len(paths) - _MAX_NAMES} more" if len(paths) > _MAX_NAMES else "")


def _by_number(path: Path) -> list[tuple[int, str]]:
    """Return a key that sorts `rank-2` before `rank-10`."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d{1,18})", path.name)]
