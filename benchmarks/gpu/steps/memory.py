"""Host memory: how much there is, and how fast it is filled and pinned. Later steps' lengths follow from these rates.

Some virtual machines get their memory only as they touch it: touching it first keeps that out of all that is timed.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

import torch
from step import arguments, begin

# What the largest step takes (4B parameters: 20 bytes each), and what is left to the rest of the machine.
FILL_BYTES, LEFT_BYTES = 80e9, 12e9
BLOCK_BYTES, PIN_BYTES = 1 << 32, 1 << 32
TINY_BYTES = 1 << 26


def meminfo() -> dict[str, int]:
    """MemTotal and others, bytes."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    found = (re.match(r"(\w+):\s+(\d+) kB", line) for line in lines)
    return {match[1]: int(match[2]) * 1024 for match in found if match}


def main() -> None:
    step = begin(arguments(__doc__).parse_args())
    block_bytes = TINY_BYTES if step.rehearse else BLOCK_BYTES
    fill_bytes, left_bytes = (4 * block_bytes, block_bytes) if step.rehearse else (FILL_BYTES, LEFT_BYTES)
    before = meminfo()
    step.tell(total_bytes=before["MemTotal"], available_bytes=before["MemAvailable"])
    held: list[torch.Tensor] = []
    begun = time.perf_counter()
    while len(held) * block_bytes < fill_bytes and meminfo()["MemAvailable"] > left_bytes + block_bytes:
        held.append(torch.empty(block_bytes, dtype=torch.uint8).fill_(1))
        filled = len(held) * block_bytes
        step.tell(filled_bytes=filled, fill_bytes_per_s=filled / (time.perf_counter() - begun))
    step.tell(total_bytes_after=meminfo()["MemTotal"])
    step.check("host memory for the largest step", None if step.rehearse else len(held) * block_bytes >= fill_bytes)
    del held
    if not torch.cuda.is_available():
        step.tell(pin_bytes_per_s=None)
        return
    from ebbtide.interleave.engine.devices.cuda import CudaDevice

    device = CudaDevice(torch.device("cuda"))
    begun = time.perf_counter()
    pinned = device.host((PIN_BYTES,), torch.uint8)
    step.tell(pin_bytes_per_s=PIN_BYTES / (time.perf_counter() - begun), pinned=pinned.is_pinned())


if __name__ == "__main__":
    main()
