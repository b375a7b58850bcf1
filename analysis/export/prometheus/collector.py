"""Turns a recording into metrics at each scrape."""

import socket
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from prometheus_client import core
from prometheus_client.registry import Collector

import ebbtide
from ebbtide.analysis.live import LiveMemory, LiveTrace
from ebbtide.analysis.metrics.devices import memory_timeline
from ebbtide.errors import UserError
from ebbtide.phases import ITERATION_PARTS
from ebbtide.profiler.agent.spool import POOLS

Kind = Literal["counter", "gauge", "info", "summary"]
_RANK = ("rank",)
_DEVICE = ("rank", "device")
_PHASE = (*_DEVICE, "phase")
# The pools of recordings, and those of other sources. A file may have more.
MEMORY_POOLS = (*POOLS, "cuda", "host", "tensors")
# A host has fewer. `ebbtide_ranks` counts those beyond it, too.
MAX_RANKS = 128
# A scrape reads on in a long recording for so long; the next one goes on from there.
_READ_S = 2.0
_GPU = {
    "utilization_percent": ("ebbtide_gpu_utilization_ratio", 1e-2),
    "power_w": ("ebbtide_gpu_power_watts", 1.0),
    "temperature_celsius": ("ebbtide_gpu_temperature_celsius", 1.0),
    "sm_clock_mhz": ("ebbtide_gpu_sm_clock_hertz", 1e6),
}


@dataclass(frozen=True)
class Family:
    """One metric."""

    name: str  # Name without the suffix of its type: `_total` of a counter, `_info` of an info.
    kind: Kind  # Its type. A summary has the median over the last iterations as its quantile 0.5.
    text: str  # Its description.
    labels: tuple[str, ...]  # Names of its labels.

    @property
    def sample_names(self) -> tuple[str, ...]:
        """The names that queries use."""
        suffixes = {"counter": ("_total",), "gauge": ("",), "info": ("_info",), "summary": ("", "_sum", "_count")}
        return tuple(self.name + suffix for suffix in suffixes[self.kind])


# Every label has a bounded number of values: ranks of the job (`collector.MAX_RANKS` of them), each with one device,
# four phases, MEMORY_POOLS, two directions. An info has one series.
FAMILIES = {
    family.name: family
    for family in (
        Family("ebbtide_recording", "info", "The recording.", ("trace", "host", "version")),
        Family("ebbtide_ranks", "gauge", "Ranks that have begun to record on this host.", ()),
        Family("ebbtide_rank_recording", "gauge", "1 while the rank records, 0 when it is silent or has ended.", _RANK),
        Family("ebbtide_iterations", "counter", "Finished iterations since the recording began.", _RANK),
        Family("ebbtide_iteration_seconds", "summary", "Time of finished iterations.", _RANK),
        Family(
            "ebbtide_phase_seconds",
            "summary",
            "Time of a phase in finished iterations: forward, backward, update, or other.",
            (*_RANK, "phase"),
        ),
        Family("ebbtide_memory_bytes", "gauge", "Newest value of a memory pool.", (*_DEVICE, "pool")),
        Family("ebbtide_memory_capacity_bytes", "gauge", "Memory of the device.", _DEVICE),
        Family("ebbtide_free_bytes", "gauge", "Free memory of the device now.", _DEVICE),
        Family("ebbtide_phase_peak_bytes", "gauge", "Peak in a phase, median over the last iterations.", _PHASE),
        Family("ebbtide_phase_free_bytes", "gauge", "Least free memory in a phase, median as of the peaks.", _PHASE),
        Family("ebbtide_link_bytes", "counter", "Bytes moved over the link: h2d, d2h.", (*_DEVICE, "direction")),
        Family("ebbtide_link_peak_bytes_per_second", "gauge", "Peak of the link in one direction.", _DEVICE),
        Family("ebbtide_gpu_utilization_ratio", "gauge", "Share of time in which a kernel ran (NVML).", _DEVICE),
        Family("ebbtide_gpu_power_watts", "gauge", "Power of the GPU.", _DEVICE),
        Family("ebbtide_gpu_temperature_celsius", "gauge", "Temperature of the GPU.", _DEVICE),
        Family("ebbtide_gpu_sm_clock_hertz", "gauge", "Clock of the GPU's processors.", _DEVICE),
    )
}  # fmt: skip


class _Sample(NamedTuple):
    """A value of a metric. `observations` and `median` are of summaries, whose value is the sum."""

    family: str
    labels: tuple[str, ...]
    value: float
    observations: int = 0
    median: float | None = None


class LiveTraceCollector(Collector):
    """The metrics of a trace that is being recorded, or of a finished one. Every scrape reads what is new."""

    def __init__(self, path: Path) -> None:
        self._live = LiveTrace(path)
        # Several scrapes may come at once.
        self._lock = threading.Lock()

    def describe(self) -> Iterable[core.Metric]:
        """Return all metrics without values, so that a scrape can ask for some of them (`?name[]=...`)."""
        return [core.Metric(family.name, family.text, family.kind) for family in FAMILIES.values()]

    def collect(self) -> Iterator[core.Metric]:
        """Yield the metrics that have values. A trace that cannot be read has only its name."""
        with self._lock:
            samples = list(self._samples())
        metrics = {metric.name: metric for metric in self.describe()}
        for sample in samples:
            family, metric = FAMILIES[sample.family], metrics[sample.family]
            labels = dict(zip(family.labels, sample.labels, strict=True))
            if sample.median is not None:
                metric.add_sample(family.name, {**labels, "quantile": "0.5"}, sample.median)
            values = [sample.value, sample.observations] if family.kind == "summary" else [sample.value]
            for name, value in zip(family.sample_names[-len(values) :], values, strict=True):
                metric.add_sample(name, labels, value)
        yield from (metric for metric in metrics.values() if metric.samples)

    def _samples(self) -> Iterator[_Sample]:
        yield _Sample("ebbtide_recording", (self._live.path.name, socket.gethostname(), ebbtide.__version__), 1)
        try:
            deadline_s = time.monotonic() + _READ_S
            self._live.poll()
            while self._live.behind and time.monotonic() < deadline_s:
                self._live.poll()
            ranks = self._live.ranks
            yield _Sample("ebbtide_ranks", (), len(ranks))
            for rank in ranks[:MAX_RANKS]:
                yield from self._of_rank(rank)
        except UserError:
            return

    def _of_rank(self, rank: int) -> Iterator[_Sample]:
        figures, totals = self._live.rank(rank), self._live.totals(rank)
        own, device = (str(rank),), (str(rank), figures.device or "")
        median_s = {part: ms / 1e3 for part, ms in figures.median_ms.items()}
        yield _Sample("ebbtide_rank_recording", own, figures.state == "recording")
        yield _Sample("ebbtide_iterations", own, totals.iterations)
        if totals.iterations:
            yield _Sample(
                "ebbtide_iteration_seconds", own, totals.iteration_s, totals.iterations, median_s.get("iteration")
            )
        for phase, seconds in totals.phase_s.items():
            yield _Sample(
                "ebbtide_phase_seconds", (*own, phase), seconds, totals.phase_iterations[phase], median_s.get(phase)
            )
        yield from self._memory(rank, device, figures.memory)
        for direction, moved in totals.link_bytes.items():
            if moved is not None:
                yield _Sample("ebbtide_link_bytes", (*device, direction), moved)
        peaks = [link.peak_bytes_per_s for link in figures.link.values() if link.peak_bytes_per_s is not None]
        if peaks:
            yield _Sample("ebbtide_link_peak_bytes_per_second", device, peaks[0])
        for column, (name, factor) in _GPU.items():
            if column in figures.gpu:
                yield _Sample(name, device, figures.gpu[column] * factor)

    def _memory(self, rank: int, device: tuple[str, str], memory: LiveMemory | None) -> Iterator[_Sample]:
        trace = self._live.trace
        if trace is not None:
            for pool in sorted(set(MEMORY_POOLS) & set(trace.labels(rank, "memory", "pool"))):
                sizes = memory_timeline(trace, rank, pool)[1]
                if len(sizes):
                    yield _Sample("ebbtide_memory_bytes", (*device, pool), int(sizes[-1]))
        if memory is None:
            return
        if memory.capacity_bytes is not None:
            yield _Sample("ebbtide_memory_capacity_bytes", device, memory.capacity_bytes)
        if memory.free_bytes is not None:
            yield _Sample("ebbtide_free_bytes", device, memory.free_bytes)
        for phase in ITERATION_PARTS:
            if phase in memory.peak_bytes:
                yield _Sample("ebbtide_phase_peak_bytes", (*device, phase), memory.peak_bytes[phase])
            if phase in memory.min_free_bytes:
                yield _Sample("ebbtide_phase_free_bytes", (*device, phase), memory.min_free_bytes[phase])
