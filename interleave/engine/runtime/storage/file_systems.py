"""The type of the file system that a folder is on."""

from __future__ import annotations

import os
from pathlib import Path

_IN_MEMORY = ("tmpfs", "ramfs")


def memory_file_system(folder: Path) -> str | None:
    """Return the type of the file system of a folder if its files are in host memory, as in "tmpfs"; else None."""
    kind = file_system(folder)
    return kind if kind in _IN_MEMORY else None


def file_system(folder: Path) -> str | None:
    """Return the type of the file system of a folder, as in "ext4" or "tmpfs"; None if it is not known."""
    device = folder.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    for line in lines:
        fields, _, rest = line.partition(" - ")
        if fields.split()[2] == number:
            return rest.split()[0]
    return None
