"""What every iteration has at the same place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd

from ebbtide.analysis.timeseries.step_functions import Floats, Ints
from ebbtide.analysis.timeseries.thresholds import FreeLine, runs

# Free bytes where a line has no value yet: nothing can be promised there.
_NOTHING = np.iinfo(np.int64).min
Envelope = tuple[Floats, Ints]


@dataclass(frozen=True)
class Place:
    """A stretch of one phase that every iteration has.

    starts, ends: where it lies in each iteration, ns. start_ns, length_ns: where it lies in the typical iteration.
    """

    phase: str
    starts: Ints
    ends: Ints
    start_ns: float
    length_ns: float

    def windows(self, line: FreeLine, min_bytes: int) -> Iterator[tuple[float, float, int]]:
        """(begins, ends, least free bytes) of what has enough free in all iterations; 0 to 1 of the stretch."""
        yield from runs(*self.lowest(line), 1.0, min_bytes)

    def lowest(self, line: FreeLine) -> Envelope:
        """(where each value begins, from 0 to 1; values) of the least free bytes of all iterations."""
        envelopes = [_relative(line, int(s), int(e)) for s, e in zip(self.starts, self.ends, strict=True)]
        return _lowest(envelopes)


def by_place(pieces: pd.DataFrame) -> list[Place]:
    """The stretches that every iteration has, one after the other, each as long as its median: medians of starts
    would make neighbours overlap.

    pieces: iteration, phase, place, origin_ns, start_ns, end_ns.
    """
    pieces = pieces[pieces["iteration"].notna()]
    every = set(pieces["iteration"])
    groups = []
    for (phase, place), group in pieces[pieces["end_ns"] > pieces["start_ns"]].groupby(["phase", "place"], sort=False):
        # The first iteration begins with its first phase: it alone may have nothing before it.
        lacking = every - set(group["iteration"])
        if not lacking or ((phase, place) == ("other", 0) and lacking == {min(every)}):
            groups.append((float((group["start_ns"] - group["origin_ns"]).median()), str(phase), group))
    places = []
    reached = 0.0
    for _, phase, group in sorted(groups, key=lambda item: item[0]):
        starts, ends = group["start_ns"].to_numpy(np.int64), group["end_ns"].to_numpy(np.int64)
        length = float(np.median(ends - starts))
        places.append(Place(phase, starts, ends, reached, length))
        reached += length
    return places


def _relative(line: FreeLine, start: int, end: int) -> Envelope:
    """(where each value begins, from 0 to 1; values) of the line within [start, end)."""
    times, free = line.between(start, end)
    places = (times - start) / (end - start)
    if not len(places) or places[0] > 0:
        places, free = np.append(0.0, places), np.append(_NOTHING, free)
    return places, free


def _lowest(envelopes: list[Envelope]) -> Envelope:
    """The lowest of several step functions on [0, 1)."""
    while len(envelopes) > 1:
        paired = [_lower(*pair) for pair in zip(envelopes[::2], envelopes[1::2], strict=False)]
        envelopes = paired + envelopes[len(paired) * 2 :]
    return envelopes[0]


def _lower(one: Envelope, other: Envelope) -> Envelope:
    places = np.union1d(one[0], other[0])
    values = np.minimum(*(free[np.searchsorted(at, places, side="right") - 1] for at, free in (one, other)))
    changes = np.append(True, np.diff(values) != 0)
    return places[changes], values[changes]
