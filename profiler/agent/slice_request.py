"""The request for a detailed slice: a symbolic link in the folder of the spools, whose target is the request's text.

A link is replaced as a whole, and reading it opens no descriptor in the job, cannot block and cannot fail in the way
in which reading a mapped file does that somebody truncates (SIGBUS).
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

REQUEST = "slice-request"
MAX_ITERATIONS = 1_000_000
MAX_POLL_MS = 60_000.0

_LAST_ITERATION = 2**32 - 1
_LAST_TIME = 2**63 - 1
_TEXT = re.compile(
    r"ebbtide-slice-1 ([0-9]{1,19}) iterations ([0-9]{1,10}):([0-9]{1,10}) poll ([0-9]{1,8}) "
    r"allocator ([0-9]{1,7}) transfers ([01])"
)


@dataclass(frozen=True)
class SliceRequest:
    """A request for a detailed slice."""

    number: int  # Its time in ns of CLOCK_MONOTONIC, which identifies it.
    first: int
    end: int  # End of these iterations (exclusive).
    poll_us: int = 25_000  # Interval of memory readings between phase boundaries, in us; 0: none.
    allocator_iterations: int = 0
    transfers: bool = False

    @property
    def poll_ms(self) -> float:
        """Interval of memory readings between phase boundaries, in ms."""
        return self.poll_us / 1e3

    def text(self) -> str:
        """Return the text that `parse_request` reads."""
        return (
            f"ebbtide-slice-1 {self.number} iterations {self.first}:{self.end} poll {self.poll_us} "
            f"allocator {self.allocator_iterations} transfers {int(self.transfers)}"
        )


def parse_request(text: str) -> SliceRequest | None:
    """Parse a text that anybody may have written; return None for anything but a request within its bounds."""
    match = _TEXT.fullmatch(text)
    if match is None:
        return None
    number, first, end, poll_us, allocator_iterations = map(int, match.groups()[:5])
    if not 0 < number <= _LAST_TIME or not first < end <= _LAST_ITERATION or end - first > MAX_ITERATIONS:
        return None
    if poll_us > MAX_POLL_MS * 1e3 or allocator_iterations > end - first:
        return None
    return SliceRequest(number, first, end, poll_us, allocator_iterations, match[6] == "1")


def read_request(directory: str) -> SliceRequest | None:
    """Return the request in the folder of the spools; None without one that this process's user or root has written."""
    path = os.path.join(directory, REQUEST)
    try:
        text = os.readlink(path)
        owner = os.lstat(path).st_uid
    except OSError:
        return None
    return parse_request(text) if owner in (os.geteuid(), 0) else None
