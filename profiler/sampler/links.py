"""Link use of one card, from the best counter that it has (docs/recording.md lists them with their traps)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from ebbtide.profiler.agent.spool import LINK_SOURCES
from ebbtide.profiler.sampler.nvml import Gpu, GpuLost, NvmlError

Clock = Callable[[], int]

_ABSURD_BYTES_PER_S = 1e12
_MAY_WRAP_NS = 60_000_000  # 2**32 bytes pass in 68 ms over PCIe 5 x16
_GPM_LEAST_NS = 100_000_000


@dataclass(frozen=True)
class LinkSample:
    """Mean rates over the window that ended at t_ns, in bytes/s."""

    t_ns: int
    window_ns: int
    h2d_bytes_per_s: float
    d2h_bytes_per_s: float


class LinkSource(Protocol):
    name: str
    period_s: float

    def read(self) -> LinkSample | None:
        """The next sample; None where one more reading is needed first. Raises NvmlError."""


class CounterSource:
    """Byte counters of the card: exact over any window. They wrap."""

    name = LINK_SOURCES[0]
    period_s = 0.01

    def __init__(self, gpu: Gpu, clock: Clock = time.monotonic_ns) -> None:
        self._gpu = gpu
        self._clock = clock
        self._last: tuple[int, int, int] | None = None

    def read(self) -> LinkSample | None:
        received, sent = self._gpu.pcie_counters()
        now = self._clock()
        last, self._last = self._last, (now, received, sent)
        if last is None or now <= last[0]:
            return None
        if now - last[0] > _MAY_WRAP_NS and max(received, sent, *last[1:]) < 2**32:
            return None  # after failures: nobody knows how often a counter of 32 bits went round
        seconds = (now - last[0]) / 1e9
        rates = wrapped(last[1], received) / seconds, wrapped(last[2], sent) / seconds
        # A counter that stepped back by a little looks like one that went all the way round.
        return LinkSample(now, now - last[0], *rates) if max(rates) < _ABSURD_BYTES_PER_S else None


class GpmSource:
    """The performance monitor of Hopper and newer: means between two samples, at least 100 ms apart."""

    name = LINK_SOURCES[1]
    period_s = 0.12

    def __init__(self, gpu: Gpu, clock: Clock = time.monotonic_ns) -> None:
        self._gpu = gpu
        self._clock = clock
        self._last: tuple[int, Any] | None = None

    def read(self) -> LinkSample | None:
        if self._last is not None and self._clock() - self._last[0] < _GPM_LEAST_NS:
            return None
        sample = self._gpu.gpm_sample()
        now = self._clock()
        last, self._last = self._last, (now, sample)
        if last is None:
            return None
        try:
            rates = self._gpu.gpm_rates(last[1], sample)
        finally:
            self._gpu.gpm_free(last[1])
        return LinkSample(now, now - last[0], *rates)


class ThroughputSource:
    """`nvmlDeviceGetPcieThroughput`: a window of 20 ms per direction, one after the other."""

    name = LINK_SOURCES[2]
    period_s = 0.0  # it blocks long enough by itself

    def __init__(self, gpu: Gpu, clock: Clock = time.monotonic_ns) -> None:
        self._gpu = gpu
        self._clock = clock

    def read(self) -> LinkSample | None:
        rates = self._gpu.pcie_throughput()
        return LinkSample(self._clock(), 20_000_000, *rates)


def best_source(gpu: Gpu) -> tuple[LinkSource | None, list[str]]:
    """The first source that answers, and why those before it do not. Raises GpuLost."""
    refused = []
    for source in (CounterSource(gpu), GpmSource(gpu), ThroughputSource(gpu)):
        if isinstance(source, GpmSource) and not gpu.gpm_supported():
            refused.append(f"{source.name}: not on this card")
            continue
        try:
            source.read()
            if isinstance(source, GpmSource):
                # Only its second sample shows whether the card gives the link's metrics.
                time.sleep(source.period_s)
                source.read()
        except GpuLost:
            raise
        except NvmlError as error:
            refused.append(f"{source.name}: {error}")
            continue
        return source, refused
    return None, refused


def wrapped(before: int, after: int) -> int:
    """How far a counter moved that starts again at 2**32 or 2**64."""
    if after >= before:
        return after - before
    return after - before + (2**32 if before < 2**32 else 2**64)
