"""How fast copies between host and GPU are. Needs a GPU; the arithmetic on event times does not."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ebbtide.interleave.calibrate.cpu import beside
from ebbtide.interleave.calibrate.record import Record, Setup
from ebbtide.interleave.calibrate.timing import Timed, timed

# A power of two: torch's pinned memory is rounded up to one, so this is pinned exactly.
_COPY_BYTES = 256 << 20
_LEAST_COPIES = 5
# Enough in one go to keep the link busy, few enough to stop soon.
_AT_ONCE = 4
_REST_S = 0.3

# (ms of a first mark, then of the end of each copy), one line of times for each direction.
Line = Sequence[float]


@dataclass(frozen=True)
class Known:
    """Copies whose bytes are known, between two times of the monotonic clock."""

    start_ns: int
    end_ns: int
    nbytes: int

    @property
    def bytes_per_s(self) -> float:
        return self.nbytes / (self.end_ns - self.start_ns) * 1e9


class Link:
    """Buffers on both sides, and a stream for each direction, of one device."""

    def __init__(self, device: int) -> None:
        with torch.cuda.device(device):
            self._device = device
            self._streams = {"h2d": torch.cuda.Stream(), "d2h": torch.cuda.Stream()}
            self._buffers = {}
            for way in self._streams:
                pinned = torch.ones(_COPY_BYTES, dtype=torch.uint8).pin_memory()
                there = torch.ones(_COPY_BYTES, dtype=torch.uint8, device="cuda")
                self._buffers[way] = (there, pinned) if way == "h2d" else (pinned, there)
            torch.cuda.synchronize()

    def copies(self, ways: Sequence[str], count: int) -> list[Line]:
        """Make so many copies in each direction, all directions at once; returns their times when all have ended."""
        with torch.cuda.device(self._device):
            begin = torch.cuda.Event(enable_timing=True)
            begin.record()
            marks: list[list[Any]] = [[] for _ in ways]
            for number in range(count + 1):
                for way, line in zip(ways, marks, strict=True):
                    target, source = self._buffers[way]
                    with torch.cuda.stream(self._streams[way]):
                        if number:
                            target.copy_(source, non_blocking=True)
                        else:
                            self._streams[way].wait_event(begin)
                        event = torch.cuda.Event(enable_timing=True, blocking=True)
                        event.record()
                    line.append(event)
            # These events put the waiting thread to sleep: to spin would take a core from an update beside.
            for line in marks:
                line[-1].synchronize()
            return [[begin.elapsed_time(event) for event in line] for line in marks]

    def count_for(self, ways: Sequence[str], seconds: float) -> int:
        """How many copies fill a time."""
        length = min(copy_seconds(self.copies(ways, _LEAST_COPIES)[0]))
        return max(_LEAST_COPIES, round(seconds / length))

    def known(self, way: str, seconds: float) -> Known:
        """Copy in one direction for about that long, after a rest, so that counters can see it begin."""
        count = self.count_for([way], seconds)
        time.sleep(_REST_S)
        begin = time.monotonic_ns()
        self.copies([way], count)
        return Known(begin, time.monotonic_ns(), count * _COPY_BYTES)


def copy_seconds(line: Line) -> list[float]:
    """How long each copy took, s."""
    return [(end - begin) / 1e3 for begin, end in itertools.pairwise(line)]


def together_bytes_per_s(lines: Sequence[Line], nbytes: int) -> float:
    """What passed in all directions together, while all of them were busy. nbytes: of each copy, which is taken to go
    at one speed from its beginning to its end."""
    begin, end = max(line[0] for line in lines), min(line[-1] for line in lines)
    moved = sum(float(np.diff(np.interp([begin, end], line, nbytes * np.arange(len(line))))[0]) for line in lines)
    return moved / (end - begin) * 1e3


def pinned(setup: Setup, record: Record) -> None:
    """h2d_bytes_per_s, d2h_bytes_per_s, duplex_bytes_per_s: of pinned memory, by CUDA events."""
    assert setup.device is not None
    link = Link(setup.device)
    how = f"pinned copies of {_COPY_BYTES >> 20} MiB by CUDA events"
    for way in ("h2d", "d2h"):
        timing = Timed.of(copy_seconds(_copies(link, [way], setup)[0]))
        record.rate(f"{way}_bytes_per_s", _COPY_BYTES / timing.seconds, how, timing)
    lines = _copies(link, ["h2d", "d2h"], setup)
    record.rate("duplex_bytes_per_s", together_bytes_per_s(lines, _COPY_BYTES), f"{how}, both ways at once, the sum")


def _copies(link: Link, ways: Sequence[str], setup: Setup) -> list[Line]:
    count = link.count_for(ways, setup.window_s)
    setup.ranks.wait()
    return link.copies(ways, count)


def pageable(setup: Setup, record: Record) -> None:
    """h2d_pageable_bytes_per_s, d2h_pageable_bytes_per_s: of host memory that is not pinned and has been touched
    before, by the host's clock (such copies block it)."""
    host = torch.ones(_COPY_BYTES, dtype=torch.uint8)
    there = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=f"cuda:{setup.device}")
    for way, target, source in (("h2d", there, host), ("d2h", host, there)):

        def copy(target: torch.Tensor = target, source: torch.Tensor = source) -> None:
            target.copy_(source)
            torch.cuda.synchronize(setup.device)

        timing = timed(copy, setup.window_s, setup.ranks)
        how = f"pageable copies of {_COPY_BYTES >> 20} MiB by the host's clock"
        record.rate(f"{way}_pageable_bytes_per_s", _COPY_BYTES / timing.seconds, how, timing)


def contention(setup: Setup, record: Record) -> None:
    """How the update on the CPU slows while pinned copies go both ways, and they by it."""
    assert setup.device is not None
    link = Link(setup.device)

    def copy() -> int:
        link.copies(["h2d", "d2h"], _AT_ONCE)
        return 2 * _AT_ONCE * _COPY_BYTES

    beside(setup, record, copy, "pinned copies both ways", setup.threads, traffic=1.0)
