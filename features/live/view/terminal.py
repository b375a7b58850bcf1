"""Runs the view in this terminal, at low priority."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ebbtide.errors import TraceError, UserError
from ebbtide.extras import missing_text
from ebbtide.terminal_lines import print_note

if TYPE_CHECKING:
    from ebbtide.profiler.recording.launch import BackgroundJob

# The lowest priority: on a core that the job uses as well, the view has at most 1.5 %
# of the time.
_NICE = 19
# More ranks take longer to read than one waits without a word.
_MANY_RANKS = 32


def require_terminal(name: str, alternative: str) -> None:
    """Raise UserError unless there are textual and a terminal that can show the
    view."""
    if importlib.util.find_spec("textual") is None:
        raise UserError(f"{name}: {missing_text('textual')}")
    # textual draws on stderr.
    if not all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)):
        raise UserError(
            f"{name} needs a terminal, and this is a file or a pipe: {alternative}"
        )
    if os.environ.get("TERM", "dumb") in ("", "dumb", "unknown"):
        raise UserError(
            f"{name} needs a terminal that can move its cursor, and TERM is dumb: "
            f"{alternative}"
        )


def show(path: Path, job: BackgroundJob | None = None) -> None:
    """Show a trace until the user leaves the view. Raises UserError where it is none,
    or became unreadable."""
    from ebbtide.features.live.trace import LiveTrace
    from ebbtide.features.live.view.app import LiveView
    from ebbtide.features.live.view.snapshot import (
        MAX_ITERATIONS,
        RecordingSnapshot,
        SnapshotReader,
    )
    from ebbtide.profiler.trace.files import read_meta

    with contextlib.suppress(OSError):
        os.nice(_NICE)
    count = 0
    with contextlib.suppress(TraceError, OSError, TypeError):
        count = len(read_meta(path).get("ranks") or ())
    if count > _MANY_RANKS:
        print_note(
            f"reading {count} ranks; `ebbtide report` compares so many on a page"
        )
    reader = SnapshotReader(LiveTrace(path, MAX_ITERATIONS))
    # Before the screen changes: an error is one line.
    snapshot = reader.read(0) or RecordingSnapshot(path)
    # The mouse stays with the terminal, so that text can be selected.
    error = LiveView(reader, snapshot, job).run(mouse=False)
    if error is not None:
        raise UserError(error)
