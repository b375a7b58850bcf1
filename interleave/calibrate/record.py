"""Input and results of a calibration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ebbtide.interleave.calibrate.ranks import Ranks
from ebbtide.interleave.calibrate.timing import Timing
from ebbtide.machines.gpu_compute import GpuCompute
from ebbtide.machines.storage import StoragePath


@dataclass(frozen=True)
class Setup:
    """Input of all measurements of one rank.

    Attributes:
        ranks: The ranks that measure at the same time.
        threads: CPU threads of this rank.
        cores: CPU cores of this rank.
        working_set: Bytes of host memory to measure over.
        window_s: Duration of each measurement in seconds.
        device: Number of this rank's CUDA device; None without a GPU.
    """

    ranks: Ranks
    threads: int
    cores: int
    working_set: int
    window_s: float
    device: int | None


@dataclass
class Record:
    """Results of a calibration.

    Attributes:
        rates: Rates by their keys in a machine file.
        alone: The same rates of one rank while the others on its host are idle; empty where not measured.
        measured: How each rate was measured, the number of runs, and their spread.
        storage: Measured paths for state that host memory does not hold.
        gpu: Arithmetic and memory of the GPU; None where there is none.
        extra: Further keys of the machine file.
        notes: Lines for the user.
    """

    rates: dict[str, float] = field(default_factory=dict)
    alone: dict[str, float] = field(default_factory=dict)
    measured: dict[str, dict[str, Any]] = field(default_factory=dict)
    storage: list[StoragePath] = field(default_factory=list)
    gpu: GpuCompute | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def rate(self, key: str, value: float, how: str, timing: Timing | None = None) -> None:
        """Record a rate and how it was measured."""
        self.rates[key] = value
        self.describe(key, how, timing)

    def describe(self, key: str, how: str, timing: Timing | None = None) -> None:
        """Record how a value of the machine file was measured."""
        runs = {"runs": timing.runs, "spread": round(timing.spread, 4)} if timing is not None else {}
        self.measured[key] = {"how": how, **runs}

    def host_traffic(self, bytes_per_s: float, how: str, timing: Timing | None = None) -> None:
        """Record measured traffic of host memory. The highest one of all measurements is taken as its bandwidth."""
        key = "host_memory_bytes_per_s"
        if bytes_per_s > self.rates.get(key, 0.0):
            self.rate(key, bytes_per_s, how, timing)
