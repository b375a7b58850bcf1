"""Which device and which pool a rank's figures are about."""

from __future__ import annotations

from typing import Any

import numpy as np

from ebbtide.analysis.metrics.cache import once_per_trace
from ebbtide.analysis.timeseries.step_functions import Ints
from ebbtide.profiler.trace import Trace


@once_per_trace
def memory_line(trace: Trace, rank: int, pool: str) -> tuple[Ints, Ints]:
    """(times ns, bytes) of one pool: on the rank's first device, or on the host for a pool of the host's."""
    rows = trace.memory(rank)
    rows = rows[rows["pool"] == pool]
    device = main_device(trace, rank)
    if (rows["device"] == device).any():
        rows = rows[rows["device"] == device]
    return rows["t_ns"].to_numpy(np.int64), rows["bytes"].to_numpy(np.int64)


def main_device(trace: Trace, rank: int) -> str | None:
    device: str | None = first_device(trace, rank).get("device")
    return device


def capacity_bytes(trace: Trace, rank: int) -> int | None:
    """The memory of the rank's first device: the card's, or the host's where the job runs on the CPU."""
    capacity: int | None = first_device(trace, rank).get("capacity_bytes")
    return capacity


def link_peak(trace: Trace, rank: int) -> float | None:
    """The most that the link of the rank's first device carries in one direction, bytes/s; None where not known."""
    peak: float | None = (first_device(trace, rank).get("link") or {}).get("peak_bytes_per_s")
    return peak


def first_device(trace: Trace, rank: int) -> dict[str, Any]:
    """The meta of the device that a rank's figures are about; empty where the trace names none."""
    devices: list[dict[str, Any]] = trace.rank(rank).get("devices") or [{}]
    return devices[0]


# What says most about a device, the surest first. A snapshot or a memory timeline alone has only its tensors.
_POOLS = ("device", "allocated", "requested", "tensors", "heap")


@once_per_trace
def main_pool(trace: Trace) -> str | None:
    """The pool that says most about the device: `device` where recorded, else `allocated`, `requested` or `tensors`,
    else `heap`."""
    recorded = {pool for rank in trace.ranks for pool in trace.memory(rank)["pool"].unique()}
    return next((pool for pool in _POOLS if pool in recorded), None)
