"""The end of the output of a view's job, and the trace that a view without a name shows."""

import os
from pathlib import Path

from ebbtide.errors import TraceError, UserError
from ebbtide.profiler.recording.lock import collector_runs
from ebbtide.profiler.trace.files import META, read_meta

# Of a longer output only the end is shown.
_TAIL_BYTES = 20_000


def tail(log: Path) -> str:
    """Return the end of a job's output."""
    try:
        with open(log, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError as error:
        return f"the output cannot be read: {error.strerror or error}"
    return text if size <= _TAIL_BYTES else text.partition("\n")[2]


def newest_recording(folder: Path) -> Path:
    """Return the trace of a folder whose recording runs and began last. Raises UserError where none runs."""
    began: list[tuple[int, Path]] = []
    for path in sorted(folder.glob(f"*/{META}")):
        try:
            meta = read_meta(path.parent)
        except TraceError:
            continue
        if meta.get("state") == "recording" and collector_runs(path.parent):
            began.append((int(meta.get("started_wall_ns") or 0), path.parent))
    if not began:
        raise UserError(
            "no recording runs in this folder: name a trace (ebbtide watch RUN.ebb), or begin one (ebbtide profile)"
        )
    return max(began)[1]
