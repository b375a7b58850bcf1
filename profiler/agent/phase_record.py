"""The record of one phase, and the codes of phases."""

from __future__ import annotations

from typing import NamedTuple

from .gpu_clock import EventMark
from .spool import PHASES

FORWARD, BACKWARD, UPDATE = range(len(PHASES))


class PhaseRecord(NamedTuple):
    """A finished phase. `micro_batch` and `source` count from 1; 0: not known."""

    phase: int
    sequence: int
    micro_batch: int
    source: int
    start_ns: int
    end_ns: int
    start_mark: EventMark | None
    end_mark: EventMark | None
