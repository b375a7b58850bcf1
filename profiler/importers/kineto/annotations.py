"""Ranges that the job itself names (`record_function`), in a Kineto trace."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from ebbtide.profiler.chrome_trace.events import MISSING, Event, spans
from ebbtide.profiler.chrome_trace.int_table import IntTable

# The category of annotations of the host; those of the device have another.
ANNOTATION = "user_annotation"
# A trace with more would grow by what nobody reads one by one.
MAX_COUNT = 200_000


class Annotations:
    """Collects annotations of the host.

    Attributes:
        count: Number of annotations. If there are more than 200,000, none is kept.
    """

    def __init__(self) -> None:
        self.count = 0
        self._names: dict[str, int] = {}
        self._rows = IntTable("start", "end", "name", "thread")

    @property
    def are_kept(self) -> bool:
        """Whether the trace gets the table."""
        return self.count <= MAX_COUNT

    def add(self, events: list[Event]) -> None:
        """Add events of the category ANNOTATION."""
        self.count += len(events)
        if not self.are_kept:
            return
        names = [self._names.setdefault(event.name, len(self._names)) for event in events]
        threads = [event.tid if type(event.tid) is int and 0 <= event.tid < 1 << 62 else MISSING for event in events]
        self._rows.add(*spans(events), names, threads)

    def columns(self, base_ns: int) -> dict[str, Any]:
        """Return the columns of the table `annotations`. base_ns: added to the times of the events."""
        rows = self._rows.table() if self.are_kept else self._rows.table().iloc[:0]
        used, codes = np.unique(rows["name"], return_inverse=True)
        names = [*self._names]
        return {
            "start_ns": rows["start"] + base_ns,
            "end_ns": rows["end"] + base_ns,
            "name": pd.Categorical.from_codes(codes, [names[number] for number in used]),
            "thread": rows["thread"].astype("Int64").mask(rows["thread"] == MISSING),
        }
