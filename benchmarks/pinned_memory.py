"""Measure how fast host memory is taken before it is pinned, and what huge pages gain
in the update on the CPU.

    python benchmarks/pinned_memory.py [--gb 2] [--rounds 5]

`allocate_pinned` touches memory with huge pages on all threads of the rank, and then
registers it. Pinning itself needs a GPU and is not in these figures: without a touch
before, it also takes the pages, 4 KiB at a time on one thread. Every round measures all
in turns. Prints Markdown.
"""

from __future__ import annotations

import argparse
import mmap
import time
from collections.abc import Callable
from contextlib import closing

import numpy as np
import torch
from tables import machine_line, spread, table

from ebbtide import host_limits
from ebbtide.interleave.engine.devices import host_memory
from ebbtide.interleave.engine.numerics.kernels import CpuKernel
from ebbtide.interleave.engine.rules.adamw import Hyper


def take(nbytes: int, pages: int, threads: int) -> tuple[float, torch.Tensor]:
    """Return the seconds to take the pages of new memory, and the memory."""
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(pages)
    memory = np.frombuffer(mapping, np.uint8)
    cores, host_limits.rank_cores = host_limits.rank_cores, lambda: threads  # type: ignore[assignment]
    begin = time.perf_counter()
    host_memory._touch(memory, None)
    seconds = time.perf_counter() - begin
    host_limits.rank_cores = cores
    return seconds, torch.from_numpy(memory)


def update_seconds(memory: torch.Tensor, kernel: CpuKernel) -> float:
    """Return the seconds of an update whose state, gradient and parameter are in this
    memory."""
    params = len(memory) // 16 // 64 * 64
    state = memory[: 12 * params].view(torch.float32).view(3, params)
    grad, out = (
        memory[begin * params : (begin + 2) * params].view(torch.bfloat16)
        for begin in (12, 14)
    )
    kernel.update(grad, tuple(state), out, Hyper().scalars(1))
    begin_s = time.perf_counter()
    kernel.update(grad, tuple(state), out, Hyper().scalars(2))
    return time.perf_counter() - begin_s


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--gb", type=float, default=2.0, help="memory to take in GB (default 2)"
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="number of rounds (default 5)"
    )
    arguments = parser.parse_args()
    nbytes, threads = int(arguments.gb * 1e9), host_limits.rank_cores()
    cases: dict[str, Callable[[], tuple[float, torch.Tensor]]] = {
        "4 KiB pages, one thread": lambda: take(nbytes, mmap.MADV_NOHUGEPAGE, 1),
        f"4 KiB pages, {threads} threads": lambda: take(
            nbytes, mmap.MADV_NOHUGEPAGE, threads
        ),
        "huge pages, one thread": lambda: take(nbytes, mmap.MADV_HUGEPAGE, 1),
        f"huge pages, {threads} threads": lambda: take(
            nbytes, mmap.MADV_HUGEPAGE, threads
        ),
    }
    taken: dict[str, list[float]] = {name: [] for name in cases}
    updated: dict[str, list[float]] = {name: [] for name in cases}
    with closing(CpuKernel()) as kernel:
        for _ in range(arguments.rounds):
            for name, case in cases.items():
                # Uncounted: a virtual machine may have given its free huge pages back
                # to the host.
                case()
                seconds, memory = case()
                taken[name].append(nbytes / 1e9 / seconds)
                updated[name].append(
                    len(memory) / 16e6 / update_seconds(memory, kernel)
                )
                del memory
    print(machine_line(), end="\n\n")
    rows = [[name, spread(taken[name], 2), spread(updated[name], 0)] for name in cases]
    table(["memory", "taken, GB/s", "update, M parameters/s"], rows)


if __name__ == "__main__":
    main()
