"""A private copy of the folder that a job runs in."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

# Larger files are not copied, but linked: they are data.
_MAX_FILE_BYTES = 64 << 20
# A folder with more than these is no folder of a job alone.
_MAX_FILES, _MAX_BYTES = 20_000, 2 << 30


@contextmanager
def private_copy(source: Path) -> Iterator[Path | None]:
    """Yield a copy of a folder, which is removed afterwards; None for a folder that is
    too large.

    The copy is beside the folder where that can be written, so that paths with `..`
    lead to the same. Large files and hidden folders, as of versions and environments,
    are links."""
    files = _files(source)
    if files is None:
        yield None
        return
    parent = source.parent if os.access(source.parent, os.W_OK) else None
    with TemporaryDirectory(
        prefix=".ebbtide-compare-", dir=parent, ignore_cleanup_errors=True
    ) as name:
        copy = Path(name)
        for path, size in files:
            target = copy / path.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir() or path.is_symlink() or size > _MAX_FILE_BYTES:
                target.symlink_to(path)
            else:
                shutil.copy2(path, target)
        yield copy


def _files(source: Path) -> list[tuple[Path, int]] | None:
    """Return the files of a folder and their sizes; None if they are too many."""
    files: list[tuple[Path, int]] = []
    copied_bytes = 0
    for folder, names, file_names in os.walk(source):
        links = [name for name in names if _is_linked(Path(folder, name))]
        names[:] = [name for name in names if name not in links]
        for name in [*links, *file_names]:
            path = Path(folder, name)
            size = path.lstat().st_size
            copied_bytes += size if size <= _MAX_FILE_BYTES else 0
            files.append((path, size))
        if len(files) > _MAX_FILES or copied_bytes > _MAX_BYTES:
            return None
    return files


def _is_linked(folder: Path) -> bool:
    return folder.is_symlink() or folder.name.startswith(".")
