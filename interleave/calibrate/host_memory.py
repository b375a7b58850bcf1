"""Measures the bandwidth of host memory."""

from __future__ import annotations

import torch

from ebbtide.interleave.calibrate.record import Record, Setup
from ebbtide.interleave.calibrate.timing import measure_time

_MIN_WORKING_SET = 256 << 20
# More than four times the caches of most hosts; used if a host does not report its caches.
_DEFAULT_WORKING_SET = 1 << 30


def working_set(memory: int | None, cache: int | None) -> int:
    """Return the number of bytes to measure over: four times the caches, so that they hold little of it.

    Args:
        memory: Bytes of host memory of a rank; at most an eighth of it is used. None if not known.
        cache: Bytes of the last-level caches; None if not known.
    """
    size = max(_MIN_WORKING_SET, 4 * cache) if cache is not None else _DEFAULT_WORKING_SET
    return min(size, memory // 8) if memory else size


def measure_bandwidth(setup: Setup, record: Record) -> None:
    """Measure `host_memory_bytes_per_s`: bytes read plus bytes written per second with all threads of the rank.

    The better one of two loops counts. Write-allocate traffic (a cache line read only because it is about to be
    written) is not counted.
    """
    torch.set_num_threads(setup.threads)
    count = setup.working_set // 8
    target, source = torch.ones(count), torch.ones(count)
    size = 4 * count
    copy = measure_time(lambda: target.copy_(source), setup.window_s, setup.ranks)
    # In place, so that every line written has been read before, as in an update.
    add = measure_time(lambda: target.add_(source, alpha=0.5), setup.window_s, setup.ranks)
    threads = f"torch, threads: {setup.threads}, {size >> 20} MiB an array"
    record.host_traffic(2 * size / copy.seconds, f"copy ({threads})", copy)
    record.host_traffic(3 * size / add.seconds, f"in-place a += b / 2 ({threads})", add)
