"""Recording options, as the collector passes them to the agent in the environment."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass

SPOOL_DIRECTORY = "EBBTIDE_SPOOL"  # set: record into this directory
OPTIONS = "EBBTIDE_OPTIONS"
OUT_OF_MEMORY = "EBBTIDE_OOM"  # set: record out-of-memory errors alone, into the trace of this path


@dataclass(frozen=True)
class Options:
    """The recording options."""

    first: int = 0
    last: int | None = None  # End of the iterations to record (exclusive); None: to the end of the job.
    max_bytes: int | None = None  # Size limit of this process's spool, in bytes; None: no limit.
    poll_ms: float = 25.0  # Interval of memory readings between phase boundaries, in ms; 0: none.
    allocator_iterations: int = 0
    transfers: bool = False
    # Whether the process reads its memory; otherwise `poll_ms` and `allocator_iterations` mean nothing.
    memory: bool = True
    # Whether details are recorded in the slices that `ebbtide profile --attach` asks for, and only there.
    on_demand: bool = False
    errors_only: bool = False  # Whether only out-of-memory errors are recorded, into a trace that the first one makes.

    def environment(self, spool_directory: str) -> dict[str, str]:
        """Return the environment variables that make a process record itself into `spool_directory`."""
        return {SPOOL_DIRECTORY: spool_directory, OPTIONS: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls) -> Options:
        """Read the options from this process's environment; defaults if there are none."""
        return cls(**json.loads(os.environ.get(OPTIONS, "{}")))


# No iteration is the first one to record.
ERRORS_ONLY = Options(first=sys.maxsize, poll_ms=0.0, errors_only=True)
