"""Input and results of a calibration, and the timing of a call that is repeated."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ebbtide.features.calibrate.ranks import Ranks
from ebbtide.machines.machine import GpuCompute, StoragePath

MIN_RUNS = 3


@dataclass(frozen=True)
class Timing:
    """The duration of a repeated call."""

    seconds: float  # Median of one run.
    runs: int
    # Distance from the 10th to the 90th percentile, divided by the median.
    spread: float

    @classmethod
    def from_runs(cls, seconds: list[float]) -> Timing:
        """Summarize the durations of all runs in seconds."""
        short, middle, long = map(float, np.percentile(seconds, [10, 50, 90]))
        return cls(middle, len(seconds), (long - short) / middle)


def measure_time(run: Callable[[], object], window_s: float, ranks: Ranks) -> Timing:
    """Call `run` for `window_s` seconds, at least three times, and measure it.

    `run` returns when its work has ended. It is called once unmeasured before, and the
    other ranks are waited for.
    """
    return measure_times([run], window_s, ranks)[0]


def measure_times(
    runs: Sequence[Callable[[], object]], window_s: float, ranks: Ranks
) -> list[Timing]:
    """Measure several calls as `measure_time` does one, taking turns.

    What slows one down then slows down all.
    """
    for run in runs:
        run()
    ranks.wait()
    durations: list[list[float]] = [[] for _ in runs]
    end = time.perf_counter() + window_s
    while len(durations[0]) < MIN_RUNS or time.perf_counter() < end:
        for run, own in zip(runs, durations, strict=True):
            begin = time.perf_counter()
            run()
            own.append(time.perf_counter() - begin)
    return [Timing.from_runs(own) for own in durations]


@dataclass(frozen=True)
class Setup:
    """Input of all measurements of one rank."""

    ranks: Ranks
    threads: int
    cores: int
    working_set: int  # Bytes of host memory to measure over.
    window_s: float  # Duration of each measurement in seconds.
    device: int | None  # Number of this rank's CUDA device; None without a GPU.


@dataclass
class MeasurementRecord:
    """Results of a calibration."""

    rates: dict[str, float] = field(default_factory=dict)
    # The same rates of one rank while the others on its host are idle; empty where not
    # measured.
    alone: dict[str, float] = field(default_factory=dict)
    measured: dict[str, dict[str, Any]] = field(default_factory=dict)
    storage: list[StoragePath] = field(default_factory=list)
    # Arithmetic and memory of the GPU; None where there is none.
    gpu: GpuCompute | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def rate(
        self, key: str, value: float, how: str, timing: Timing | None = None
    ) -> None:
        """Record a rate and how it was measured."""
        self.rates[key] = value
        self.describe(key, how, timing)

    def describe(self, key: str, how: str, timing: Timing | None = None) -> None:
        """Record how a value of the machine file was measured."""
        runs = (
            {"runs": timing.runs, "spread": round(timing.spread, 4)}
            if timing is not None
            else {}
        )
        self.measured[key] = {"how": how, **runs}

    def host_traffic(
        self, bytes_per_s: float, how: str, timing: Timing | None = None
    ) -> None:
        """Record measured traffic of host memory. The highest one of all measurements
        is taken as its bandwidth."""
        key = "host_memory_bytes_per_s"
        if bytes_per_s > self.rates.get(key, 0.0):
            self.rate(key, bytes_per_s, how, timing)
