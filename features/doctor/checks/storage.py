"""Checks of the folder that the job starts in, as a place for offloaded state."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from ebbtide.features.doctor.check import Answer, check
from ebbtide.features.doctor.host import JobHost
from ebbtide.features.storage.engine.direct_file import (
    DirectFile,
    file_system,
    memory_file_system,
)
from ebbtide.interleave.engine.errors import EngineError
from ebbtide.units import bytes_text

_REMOTE = ("nfs", "nfs4", "cifs", "smb3", "9p")


@check("storage")
def storage(host: JobHost) -> Iterator[Answer]:
    """Check file system and direct I/O of the folder.

    Nothing is wrong where state stays in memory.
    """
    folder, kind = host.folder, file_system(host.folder) or "unknown file system"
    space = os.statvfs(folder)
    text = f"{folder}: {kind}, {bytes_text(space.f_bavail * space.f_frsize)} free"
    try:
        with (
            tempfile.TemporaryDirectory(dir=folder, prefix=".ebbtide-doctor-") as name,
            closing(DirectFile(Path(name) / "file")) as file,
        ):
            is_direct = file.is_direct
    except (OSError, EngineError) as error:
        yield "unknown", f"{text}; cannot be written ({error})"
        return
    remedy = "for state in storage name a folder on a local drive (storage=, nvme_path)"
    if memory_file_system(folder):
        yield "unknown", f"{text}; files there are host memory", remedy
    elif kind in _REMOTE:
        yield "unknown", f"{text}; reached over the network", remedy
    elif not is_direct:
        yield (
            "unknown",
            f"{text}; no O_DIRECT, so reads and writes of state go through the page "
            "cache",
            remedy,
        )
    else:
        yield "ok", f"{text}, O_DIRECT"
