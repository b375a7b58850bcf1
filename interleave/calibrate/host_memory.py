"""Measure the bandwidth of host memory."""

from __future__ import annotations

import torch

from ebbtide.interleave.calibrate.record import Record, Setup
from ebbtide.interleave.calibrate.timing import timed

_LEAST_WORKING_SET = 256 << 20
# More than four times what most hosts have; taken where a host does not tell its caches.
_BLIND_WORKING_SET = 1 << 30


def working_set(memory: int | None, cache: int | None) -> int:
    """Bytes to measure over: four times the caches, so that they hold little of it, and at most an eighth of a rank's
    memory."""
    wanted = max(_LEAST_WORKING_SET, 4 * cache) if cache is not None else _BLIND_WORKING_SET
    return min(wanted, memory // 8) if memory else wanted


def bandwidth(setup: Setup, record: Record) -> None:
    """host_memory_bytes_per_s: bytes read plus bytes written a second, with all threads of the job, the better of two
    ways. Write-allocate traffic (a line read only because it is about to be written) is not counted."""
    torch.set_num_threads(setup.threads)
    count = setup.working_set // 8
    one, other = torch.ones(count), torch.ones(count)
    size = 4 * count
    copy = timed(lambda: one.copy_(other), setup.window_s, setup.ranks)
    # In place, so that what is written has been read anyway: of all loops the likest to an update.
    add = timed(lambda: one.add_(other, alpha=0.5), setup.window_s, setup.ranks)
    threads = f"torch, threads: {setup.threads}, {size >> 20} MiB an array"
    record.host_traffic(2 * size / copy.seconds, f"copy ({threads})", copy)
    record.host_traffic(3 * size / add.seconds, f"in-place a += b / 2 ({threads})", add)
