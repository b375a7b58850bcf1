"""Paths that a dry run protects, and those that it lets through."""

from __future__ import annotations

import os
import posix
import stat
from collections.abc import Iterable, Iterator
from typing import Any

_SYSTEM_FOLDERS = ("/dev", "/proc", "/sys")
# Folders of downloads and compiled code, which are made to be written by any job.
_CACHE_VARIABLES = (
    "XDG_CACHE_HOME",
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_DATASETS_CACHE",
    "HF_MODULES_CACHE",
    "TORCH_HOME",
    "TORCH_EXTENSIONS_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "MPLCONFIGDIR",
)


def cache_folders() -> tuple[str, ...]:
    """Return the folders whose files any job may change: `~/.cache`, and those that environment variables name."""
    folders = [os.path.expanduser("~/.cache"), *(os.environ.get(name) for name in _CACHE_VARIABLES)]
    return tuple(os.path.abspath(folder) for folder in folders if folder)


def is_inside(path: str, folder: str) -> bool:
    """Return whether an absolute path is a folder or below it."""
    return path == folder or path.startswith(folder + "/")


def is_passed_through(path: str, caches: tuple[str, ...]) -> bool:
    """Return whether a dry run lets the job do as it likes at an absolute path: devices, caches, compiled modules."""
    return "/__pycache__/" in path or any(is_inside(path, folder) for folder in (*_SYSTEM_FOLDERS, *caches))


def parents(path: str) -> Iterator[str]:
    """Yield an absolute path and the folders that contain it, the innermost first."""
    yield path
    while len(path) > 1:
        path = os.path.dirname(path)
        yield path


def outermost(paths: Iterable[str]) -> list[str]:
    """Return the absolute paths that are in no other one."""
    names = dict.fromkeys(paths)
    return [path for path in names if not any(folder in names for folder in parents(os.path.dirname(path)))]


def real_entry(path: str) -> str:
    """Return a path whose folder has no symbolic links; the last part may be one."""
    return os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))


def status_of(path: str, follow: bool = True) -> Any:
    """Return the status of a path as the disk has it, past every replacement; None if it does not exist."""
    try:
        return posix.stat(path, follow_symlinks=follow)
    except (OSError, ValueError):
        return None


def is_folder(path: str) -> bool:
    """Return whether a path is a folder on the disk."""
    status = status_of(path)
    return status is not None and stat.S_ISDIR(status.st_mode)


def is_file(path: str) -> bool:
    """Return whether a path is a regular file on the disk."""
    status = status_of(path)
    return status is not None and stat.S_ISREG(status.st_mode)
