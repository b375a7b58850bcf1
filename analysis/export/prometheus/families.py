"""The metrics that Prometheus gets: their names, types, units and labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ebbtide.profiler.agent.spool import POOLS

Kind = Literal["counter", "gauge", "info", "summary"]


@dataclass(frozen=True)
class Family:
    """One metric.

    Attributes:
        name: Name without the suffix of its type: `_total` of a counter, `_info` of an info.
        kind: Its type. A summary has the median over the last iterations as its quantile 0.5.
        text: Its description.
        labels: Names of its labels.
    """

    name: str
    kind: Kind
    text: str
    labels: tuple[str, ...]

    @property
    def sample_names(self) -> tuple[str, ...]:
        """The names that queries use."""
        suffixes = {"counter": ("_total",), "gauge": ("",), "info": ("_info",), "summary": ("", "_sum", "_count")}
        return tuple(self.name + suffix for suffix in suffixes[self.kind])


_RANK = ("rank",)
_DEVICE = ("rank", "device")
_PHASE = (*_DEVICE, "phase")

# The pools of recordings, and those of other sources. A file may have more.
MEMORY_POOLS = (*POOLS, "cuda", "host", "tensors")

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
