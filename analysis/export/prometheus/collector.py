"""Turns a recording into metrics at each scrape."""

import socket
import threading
import time
from collections.abc import Iterable, Iterator
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


class Family(NamedTuple):
    """One metric."""

    kind: Kind  # Its type. A summary has the median over the last iterations as its quantile 0.5.
    text: str  # Its description.
    labels: tuple[str, ...]  # Names of its labels.


# Type -> what the names of its samples have after the name of the metric, in the order of the values of a `_Sample`.
SUFFIXES: dict[Kind, tuple[str, ...]] = {
    "counter": ("_total",),
    "gauge": ("",),
    "info": ("_info",),
    "summary": ("_sum", "_count", ""),
}
# Every label has a bounded number of values: ranks of the job (`collector.MAX_RANKS` of them), each with one device,
# four phases, MEMORY_POOLS, two directions. An info has one series.
FAMILIES = {
    "ebbtide_recording": Family("info", "The recording.", ("trace", "host", "version")),
    "ebbtide_ranks": Family("gauge", "Ranks that have begun to record on this host.", ()),
    "ebbtide_rank_recording": Family("gauge", "1 while the rank records, 0 when it is silent or has ended.", _RANK),
    "ebbtide_iterations": Family("counter", "Finished iterations since the recording began.", _RANK),
    "ebbtide_iteration_seconds": Family("summary", "Time of finished iterations.", _RANK),
    "ebbtide_phase_seconds": Family(
        "summary", "Time of a phase in finished iterations: forward, backward, update, or other.", (*_RANK, "phase")
    ),
    "ebbtide_memory_bytes": Family("gauge", "Newest value of a memory pool.", (*_DEVICE, "pool")),
    "ebbtide_memory_capacity_bytes": Family("gauge", "Memory of the device.", _DEVICE),
    "ebbtide_free_bytes": Family("gauge", "Free memory of the device now.", _DEVICE),
    "ebbtide_phase_peak_bytes": Family("gauge", "Peak in a phase, median over the last iterations.", _PHASE),
    "ebbtide_phase_free_bytes": Family("gauge", "Least free memory in a phase, median as of the peaks.", _PHASE),
    "ebbtide_link_bytes": Family("counter", "Bytes moved over the link: h2d, d2h.", (*_DEVICE, "direction")),
    "ebbtide_link_peak_bytes_per_second": Family("gauge", "Peak of the link in one direction.", _DEVICE),
    "ebbtide_gpu_utilization_ratio": Family("gauge", "Share of time in which a kernel ran (NVML).", _DEVICE),
    "ebbtide_gpu_power_watts": Family("gauge", "Power of the GPU.", _DEVICE),
    "ebbtide_gpu_temperature_celsius": Family("gauge", "Temperature of the GPU.", _DEVICE),
    "ebbtide_gpu_sm_clock_hertz": Family("gauge", "Clock of the GPU's processors.", _DEVICE),
}

# Name of a family, values of its labels, and its values, by `SUFFIXES`; those that are None are not known.
_Sample = tuple[str, tuple[str, ...], *tuple[float | None, ...]]


class LiveTraceCollector(Collector):
    """The metrics of a trace that is being recorded, or of a finished one. Every scrape reads what is new."""

    def __init__(self, path: Path) -> None:
        self._live = LiveTrace(path)
        # Several scrapes may come at once.
        self._lock = threading.Lock()

    def describe(self) -> Iterable[core.Metric]:
        """Return all metrics without values, so that a scrape can ask for some of them (`?name[]=...`)."""
        return [core.Metric(name, family.text, family.kind) for name, family in FAMILIES.items()]

    def collect(self) -> Iterator[core.Metric]:
        """Yield the metrics that have values. A trace that cannot be read has only its name."""
        with self._lock:
            samples = list(self._samples())
        metrics = {metric.name: metric for metric in self.describe()}
        for name, labels, *values in samples:
            family = FAMILIES[name]
            for suffix, value in zip(SUFFIXES[family.kind], values, strict=True):
                quantile = {"quantile": "0.5"} if family.kind == "summary" and not suffix else {}
                if value is not None:
                    named = dict(zip(family.labels, labels, strict=True))
                    metrics[name].add_sample(name + suffix, named | quantile, value)
        yield from (metric for metric in metrics.values() if metric.samples)

    def _samples(self) -> Iterator[_Sample]:
        yield "ebbtide_recording", (self._live.path.name, socket.gethostname(), ebbtide.__version__), 1
        try:
            deadline_s = time.monotonic() + _READ_S
            self._live.poll()
            while self._live.behind and time.monotonic() < deadline_s:
                self._live.poll()
            ranks = self._live.ranks
            yield "ebbtide_ranks", (), len(ranks)
            for rank in ranks[:MAX_RANKS]:
                yield from self._of_rank(rank)
        except UserError:
            return

    def _of_rank(self, rank: int) -> Iterator[_Sample]:
        figures, totals = self._live.rank(rank), self._live.totals(rank)
        own, device = (str(rank),), (str(rank), figures.device or "")
        median_s = {part: ms / 1e3 for part, ms in figures.median_ms.items()}
        yield "ebbtide_rank_recording", own, figures.state == "recording"
        yield "ebbtide_iterations", own, totals.iterations
        if totals.iterations:
            seconds = totals.iteration_s, totals.iterations, median_s.get("iteration")
            yield "ebbtide_iteration_seconds", own, *seconds
        for phase, total_s in totals.phase_s.items():
            yield "ebbtide_phase_seconds", (*own, phase), total_s, totals.phase_iterations[phase], median_s.get(phase)
        yield from self._memory(rank, device, figures.memory)
        for direction, moved in totals.link_bytes.items():
            yield "ebbtide_link_bytes", (*device, direction), moved
        for link in [*figures.link.values()][:1]:
            yield "ebbtide_link_peak_bytes_per_second", device, link.peak_bytes_per_s
        for column, (name, factor) in _GPU.items():
            if column in figures.gpu:
                yield name, device, figures.gpu[column] * factor

    def _memory(self, rank: int, device: tuple[str, str], memory: LiveMemory | None) -> Iterator[_Sample]:
        trace = self._live.trace
        if trace is not None:
            for pool in sorted(set(MEMORY_POOLS) & set(trace.labels(rank, "memory", "pool"))):
                sizes = memory_timeline(trace, rank, pool)[1]
                if len(sizes):
                    yield "ebbtide_memory_bytes", (*device, pool), int(sizes[-1])
        if memory is not None:
            yield "ebbtide_memory_capacity_bytes", device, memory.capacity_bytes
            yield "ebbtide_free_bytes", device, memory.free_bytes
            for phase in ITERATION_PARTS:
                yield "ebbtide_phase_peak_bytes", (*device, phase), memory.peak_bytes.get(phase)
                yield "ebbtide_phase_free_bytes", (*device, phase), memory.min_free_bytes.get(phase)
