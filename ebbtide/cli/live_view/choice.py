"""Chooses the recording to watch where none is named."""

from __future__ import annotations

from pathlib import Path

from ebbtide.errors import TraceError, UserError
from ebbtide.profiler.trace.files import META, read_meta
from ebbtide.profiler.trace.lock import collector_runs


def newest_recording(folder: Path) -> Path:
    """Return the trace of a folder whose recording runs and began last.

    Raises:
        UserError: No recording runs there.
    """
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
