"""Measures the bandwidth of host memory, and of each NUMA node."""

import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from ebbtide.interleave.calibrate.ranks import Ranks
from ebbtide.interleave.calibrate.record import Record, Setup, measure_time
from ebbtide.interleave.engine.devices.host_memory import gpu_node
from ebbtide.numa.binding import bind_thread, cpus_within, place_memory
from ebbtide.numa.topology import nodes_of, read_nodes

_MIN_WORKING_SET = 256 << 20
# More than four times the caches of most hosts; used if a host does not report its caches.
_DEFAULT_WORKING_SET = 1 << 30
# Remote memory that is slower than this share of local memory is worth a note.
_NOTABLE_SHARE = 0.9


def working_set(memory: int | None, cache: int | None) -> int:
    """Return the number of bytes to measure over: four times the caches, so that they hold little of it.

    `memory` is that of a rank, of which at most an eighth is used, `cache` that of the last-level caches; None: not
    known."""
    size = max(_MIN_WORKING_SET, 4 * cache) if cache is not None else _DEFAULT_WORKING_SET
    return min(size, memory // 8) if memory else size


def measure_bandwidth(setup: Setup, record: Record) -> None:
    """Measure `host_memory_bytes_per_s`: bytes read plus bytes written per second with all threads of the rank.

    The better one of two loops counts. Write-allocate traffic (a cache line read only because it is about to be
    written) is not counted."""
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


def numa_nodes() -> list[int]:
    """Return the numbers of the host's NUMA nodes with cores."""
    return [node.number for node in read_nodes() if node.cpus]


def measure_nodes(setup: Setup, record: Record) -> None:
    """Measure the memory of each NUMA node by threads on the node of the GPU, as `numa` in the machine file.

    The keys of `numa`: `node`, that of the GPU (without one, of the first core); `threads`; `bytes_per_s`, bytes read
    plus bytes written per second by node, None where the memory could not be placed there; `remote_share`, the rate of
    the slowest other node as a share of the node's own."""
    if setup.device is None:
        home = next(iter(nodes_of(os.sched_getaffinity(0), read_nodes())), None)
    else:
        home = gpu_node(torch.device("cuda", setup.device))
    if home is None:
        record.notes.append("local and remote host memory were not measured: the NUMA node of the GPU is not known")
        return
    threads = max(1, min(setup.threads, len(cpus_within(home)) or setup.threads))
    rates = {node: _node_bandwidth(setup, home, node, threads) for node in numa_nodes()}
    own = rates.get(home)
    others = [rate for node, rate in rates.items() if node != home and rate is not None]
    share = min(others) / own if own and others else None
    by_node = {str(node): rate for node, rate in rates.items()}
    record.extra["numa"] = {"node": home, "threads": threads, "bytes_per_s": by_node, "remote_share": share}
    if share is not None and share < _NOTABLE_SHARE:
        record.notes.append(
            f"memory of another NUMA node is as fast as {100 * share:.0f} % of that of node {home}: start each rank on "
            "its GPU's node (torchrun --numa-binding=node, or numactl)"
        )


def _node_bandwidth(setup: Setup, home: int, node: int, threads: int) -> float | None:
    """Return the bytes/s of in-place additions by threads on the node `home` to memory of a node."""
    target, source = (_allocate_on(node, setup.working_set // 2) for _ in range(2))
    if target is None or source is None:
        return None
    parts = list(zip(np.array_split(target, threads), np.array_split(source, threads), strict=True))
    with ThreadPoolExecutor(threads, initializer=bind_thread, initargs=(home,)) as pool:

        def add() -> None:
            # numpy releases the GIL.
            for done in [pool.submit(np.add, part, addend, part) for part, addend in parts]:
                done.result()

        # Without the other ranks: on another host, a rank may have other nodes.
        timing = measure_time(add, setup.window_s, Ranks())
    return 3 * target.nbytes / timing.seconds


def _allocate_on(node: int, nbytes: int) -> np.ndarray[Any, np.dtype[np.float32]] | None:
    """Return an array of ones in memory of a node; None if it cannot be placed there."""
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = np.frombuffer(mapping, np.float32, nbytes // 4)
    if not place_memory(memory.ctypes.data, nbytes, node):
        return None
    memory.fill(1.0)
    return memory
