"""The output of a job that the view runs."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# Of a longer output only the end is shown.
_TAIL_BYTES = 20_000


@dataclass(frozen=True)
class WatchedLog:
    """The output of a job, and the way to interrupt the job.

    Attributes:
        path: The file with its output.
        interrupt: Sends SIGINT to the job, as Ctrl-C does without the view.
    """

    path: Path
    interrupt: Callable[[], None]

    def tail(self) -> str:
        """Return the end of the output."""
        try:
            with open(self.path, "rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - _TAIL_BYTES))
                text = file.read().decode(errors="replace")
        except OSError as error:
            return f"the output cannot be read: {error.strerror or error}"
        return text if size <= _TAIL_BYTES else text.partition("\n")[2]
