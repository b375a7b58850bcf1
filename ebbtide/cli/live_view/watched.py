"""The job that a view belongs to, and the end of its output."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

# Of a longer output only the end is shown.
_TAIL_BYTES = 20_000


class WatchedJob(Protocol):
    """A job that runs beside its view.

    Attributes:
        log: The file with its output.
    """

    log: Path

    def is_finished(self) -> bool:
        """Return whether the job has ended and its trace is finished."""

    def interrupt(self) -> None:
        """Send SIGINT to the job, as Ctrl-C does without a view."""


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
