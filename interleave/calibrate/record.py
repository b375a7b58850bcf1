"""What a calibration is told, and what it finds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ebbtide.interleave.calibrate.ranks import Ranks
from ebbtide.interleave.calibrate.timing import Timed


@dataclass(frozen=True)
class Setup:
    """threads, cores: of this rank. working_set: bytes to measure over on the host. window_s: how long to measure each
    thing. device: number of this rank's CUDA device; None: there is none."""

    ranks: Ranks
    threads: int
    cores: int
    working_set: int
    window_s: float
    device: int | None


@dataclass
class Record:
    """rates: by the keys of a machine file. measured: of each rate how it was measured, in how many runs, and how they
    spread. more: further keys of the file. notes: lines for people."""

    rates: dict[str, float] = field(default_factory=dict)
    measured: dict[str, dict[str, Any]] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def rate(self, key: str, value: float, how: str, timing: Timed | None = None) -> None:
        self.rates[key] = value
        runs = {"runs": timing.runs, "spread": round(timing.spread, 4)} if timing is not None else {}
        self.measured[key] = {"how": how, **runs}

    def host_traffic(self, bytes_per_s: float, how: str, timing: Timed | None = None) -> None:
        """The bandwidth of the host's memory is the most that was ever seen to pass."""
        key = "host_memory_bytes_per_s"
        if bytes_per_s > self.rates.get(key, 0.0):
            self.rate(key, bytes_per_s, how, timing)
