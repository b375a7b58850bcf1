"""Measures how much host memory there is, and how fast it is filled and pinned. Later steps depend on these rates.

Some virtual machines get their memory only when it is first written. Writing it here keeps that out of later timings.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

import torch
from step import argument_parser, start

# Memory of the largest step (4 G parameters, 20 bytes each), and memory that is left to other processes.
FILL_BYTES, LEFT_BYTES = 80e9, 12e9
BLOCK_BYTES, PIN_BYTES = 1 << 32, 1 << 32
TINY_BYTES = 1 << 26


def meminfo() -> dict[str, int]:
    """Return MemTotal and the other entries in bytes."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    matches = (re.match(r"(\w+):\s+(\d+) kB", text) for text in lines)
    return {match[1]: int(match[2]) * 1024 for match in matches if match}


def main() -> None:
    step = start(argument_parser(__doc__).parse_args())
    block_bytes = TINY_BYTES if step.rehearse else BLOCK_BYTES
    fill_bytes, left_bytes = (4 * block_bytes, block_bytes) if step.rehearse else (FILL_BYTES, LEFT_BYTES)
    before = meminfo()
    step.add(total_bytes=before["MemTotal"], available_bytes=before["MemAvailable"])
    blocks: list[torch.Tensor] = []
    begin = time.perf_counter()
    while len(blocks) * block_bytes < fill_bytes and meminfo()["MemAvailable"] > left_bytes + block_bytes:
        blocks.append(torch.empty(block_bytes, dtype=torch.uint8).fill_(1))
        filled = len(blocks) * block_bytes
        step.add(filled_bytes=filled, fill_bytes_per_s=filled / (time.perf_counter() - begin))
    step.add(total_bytes_after=meminfo()["MemTotal"])
    step.check("host memory for the largest step", None if step.rehearse else len(blocks) * block_bytes >= fill_bytes)
    del blocks
    if not torch.cuda.is_available():
        step.add(pin_bytes_per_s=None)
        return
    from ebbtide.interleave.engine.devices.cuda import CudaDevice

    device = CudaDevice(torch.device("cuda"))
    begin = time.perf_counter()
    pinned = device.allocate_host((PIN_BYTES,), torch.uint8)
    step.add(pin_bytes_per_s=PIN_BYTES / (time.perf_counter() - begin), pinned=pinned.is_pinned())


if __name__ == "__main__":
    main()
