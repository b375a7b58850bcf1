"""Recording options from the environment, and requests for detailed slices.

The agent reads the requests while the job runs.

A request is a symbolic link whose target is its text: it is replaced as a whole, and
reading it opens no descriptor in the job, cannot block, and cannot fail as a mapped
file does that somebody truncates (SIGBUS).
"""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import asdict, dataclass

SPOOL_DIRECTORY = "EBBTIDE_SPOOL"  # set: record into this directory
OPTIONS = "EBBTIDE_OPTIONS"
# set: record out-of-memory errors alone, into the trace of this path
OUT_OF_MEMORY = "EBBTIDE_OOM"


@dataclass(frozen=True)
class Options:
    """The recording options."""

    first: int = 0
    # End of the iterations to record (exclusive); None: to the end of the job.
    last: int | None = None
    # Size limit of this process's spool, in bytes; None: no limit.
    max_bytes: int | None = None
    # Interval of memory readings between phase boundaries, in ms; 0: none.
    poll_ms: float = 25.0
    allocator_iterations: int = 0
    transfers: bool = False
    # Whether the process reads its memory; otherwise `poll_ms` and
    # `allocator_iterations` mean nothing.
    memory: bool = True
    # Whether details are recorded in the slices that `ebbtide profile --attach` asks
    # for, and only there.
    on_demand: bool = False
    # Whether only out-of-memory errors are recorded, into a trace that the first one
    # makes.
    errors_only: bool = False

    @property
    def has_details(self) -> bool:
        """Whether allocations or copies are recorded, now or when asked for."""
        return bool(self.transfers or self.allocator_iterations or self.on_demand)

    def environment(self, spool_directory: str) -> dict[str, str]:
        """Return the environment variables that make a process record itself into
        `spool_directory`."""
        return {SPOOL_DIRECTORY: spool_directory, OPTIONS: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls) -> Options:
        """Read the options from this process's environment, or return the defaults."""
        return cls(**json.loads(os.environ.get(OPTIONS, "{}")))


# No iteration is the first one to record.
ERRORS_ONLY = Options(first=sys.maxsize, poll_ms=0.0, errors_only=True)


REQUEST = "slice-request"
MAX_ITERATIONS = 1_000_000
MAX_POLL_MS = 60_000.0

_LAST_ITERATION = 2**32 - 1
_LAST_TIME = 2**63 - 1
_TEXT = re.compile(
    r"ebbtide-slice-1 ([0-9]{1,19}) iterations ([0-9]{1,10}):([0-9]{1,10}) poll "
    r"([0-9]{1,8}) "
    r"allocator ([0-9]{1,7}) transfers ([01])"
)


@dataclass(frozen=True)
class SliceRequest:
    """A request for a detailed slice."""

    number: int  # Its time in ns of CLOCK_MONOTONIC, which identifies it.
    first: int
    end: int  # End of these iterations (exclusive).
    # Interval of memory readings between phase boundaries, in us; 0: none.
    poll_us: int = 25_000
    allocator_iterations: int = 0
    transfers: bool = False

    @property
    def poll_ms(self) -> float:
        """Interval of memory readings between phase boundaries, in ms."""
        return self.poll_us / 1e3

    def text(self) -> str:
        """Return the text that `parse_request` reads."""
        return (
            f"ebbtide-slice-1 {self.number} iterations {self.first}:{self.end} poll "
            f"{self.poll_us} "
            f"allocator {self.allocator_iterations} transfers {int(self.transfers)}"
        )


def parse_request(text: str) -> SliceRequest | None:
    """Parse a text that anybody may have written.

    Return None for anything but a request within its bounds.
    """
    match = _TEXT.fullmatch(text)
    if match is None:
        return None
    number, first, end, poll_us, allocator_iterations = map(int, match.groups()[:5])
    if (
        not 0 < number <= _LAST_TIME
        or not first < end <= _LAST_ITERATION
        or end - first > MAX_ITERATIONS
    ):
        return None
    if poll_us > MAX_POLL_MS * 1e3 or allocator_iterations > end - first:
        return None
    return SliceRequest(
        number, first, end, poll_us, allocator_iterations, match[6] == "1"
    )


def read_request(directory: str) -> SliceRequest | None:
    """Return the request in the folder of the spools.

    Return None if there is none that this process's user or root has written.
    """
    path = os.path.join(directory, REQUEST)
    try:
        text = os.readlink(path)
        owner = os.lstat(path).st_uid
    except OSError:
        return None
    return parse_request(text) if owner in (os.geteuid(), 0) else None
