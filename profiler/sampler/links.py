"""Link throughput of one GPU, from the best counter that it has.

The counters and their limits are in docs/recording.md.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ebbtide.profiler.agent.spool import LINK_SOURCES
from ebbtide.profiler.sampler.gpu import Gpu
from ebbtide.profiler.sampler.nvml import GpuLost, NvmlError

# Twice PCIe 6 x16; what a counter of 32 bits shows that steps back within 10 ms is
# more.
_IMPOSSIBLE_BYTES_PER_S = 2.5e11
_MAY_WRAP_NS = 35_000_000  # 2**32 bytes pass in 35.5 ms over PCIe 6 x16
_MIN_GPM_WINDOW_NS = 100_000_000
_THROUGHPUT_WINDOW_NS = 20_000_000


@dataclass(frozen=True)
class LinkSample:
    """Mean throughput over a window. `t_ns`: end of the window."""

    t_ns: int
    window_ns: int
    h2d_bytes_per_s: float
    d2h_bytes_per_s: float


class LinkSource:
    """A source of link throughput. `period_s`: pause between two readings, in s."""

    name: str
    period_s: float

    def __init__(self, gpu: Gpu, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._gpu = gpu
        self._clock = clock
        # time in ns and values of the last reading
        self._last: tuple[Any, ...] | None = None

    def read(self) -> LinkSample | None:
        """Return the next sample; None if one more reading is needed first. Raises
        NvmlError."""
        raise NotImplementedError


class CounterSource(LinkSource):
    """Byte counters of the card: exact over any window. They wrap."""

    name = LINK_SOURCES[0]
    period_s = 0.01

    def read(self) -> LinkSample | None:
        """Return the mean since the reading before."""
        received, sent = self._gpu.read_pcie_counters()
        now_ns = self._clock()
        last, self._last = self._last, (now_ns, received, sent)
        if last is None or now_ns <= last[0]:
            return None
        last_ns, last_received, last_sent = last
        window_ns = now_ns - last_ns
        if (
            window_ns > _MAY_WRAP_NS
            and max(received, sent, last_received, last_sent) < 2**32
        ):
            # after failures: a counter of 32 bits may have wrapped any number of times
            return None
        rates = (
            counter_increase(last_received, received) / (window_ns / 1e9),
            counter_increase(last_sent, sent) / (window_ns / 1e9),
        )
        # A counter that stepped back by a little looks like one that has wrapped.
        return (
            LinkSample(now_ns, window_ns, *rates)
            if max(rates) < _IMPOSSIBLE_BYTES_PER_S
            else None
        )


class GpmSource(LinkSource):
    """The performance monitor of Hopper and newer, which gives means between two
    samples, at least 100 ms apart."""

    name = LINK_SOURCES[1]
    period_s = 0.12

    def read(self) -> LinkSample | None:
        """Return the mean since the sample before.

        Return None also where it is too early for another one.
        """
        if (
            self._last is not None
            and self._clock() - self._last[0] < _MIN_GPM_WINDOW_NS
        ):
            return None
        sample = self._gpu.take_gpm_sample()
        now_ns = self._clock()
        last, self._last = self._last, (now_ns, sample)
        if last is None:
            return None
        last_ns, last_sample = last
        try:
            rates = self._gpu.read_gpm_rates(last_sample, sample)
        finally:
            self._gpu.free_gpm_sample(last_sample)
        return LinkSample(now_ns, now_ns - last_ns, *rates)


class ThroughputSource(LinkSource):
    """`nvmlDeviceGetPcieThroughput`: a window of 20 ms per direction, in turn."""

    name = LINK_SOURCES[2]
    period_s = 0.0  # it blocks long enough by itself

    def read(self) -> LinkSample | None:
        """Return a sample; blocks for about 42 ms.

        Where the driver answers at once, it blocks for a window at least.
        """
        begin_s = time.monotonic()
        rates = self._gpu.read_pcie_throughput()
        time.sleep(max(0.0, begin_s + _THROUGHPUT_WINDOW_NS / 1e9 - time.monotonic()))
        return LinkSample(self._clock(), _THROUGHPUT_WINDOW_NS, *rates)


def best_source(gpu: Gpu) -> tuple[LinkSource | None, list[str]]:
    """Return the first source that answers, and why those before do not.

    The source is None if none counts this GPU's traffic.
    """
    obstacle = gpu.link_obstacle()
    if obstacle is not None:
        return None, [obstacle]
    reasons = []
    for source in (CounterSource(gpu), GpmSource(gpu), ThroughputSource(gpu)):
        if isinstance(source, GpmSource) and not gpu.supports_gpm():
            reasons.append(f"{source.name}: not on this card")
            continue
        try:
            source.read()
            if isinstance(source, GpmSource):
                # Only its second sample shows whether the card gives the link's
                # metrics.
                time.sleep(source.period_s)
                source.read()
        except GpuLost:
            raise
        except NvmlError as error:
            reasons.append(f"{source.name}: {error}")
            continue
        return source, reasons
    return None, reasons


def counter_increase(before: int, after: int) -> int:
    """Return by how much a counter increased that wraps at 2**32 or 2**64."""
    if after >= before:
        return after - before
    return after - before + (2**32 if before < 2**32 else 2**64)
