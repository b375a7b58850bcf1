"""Measures how much host memory there is, and how fast it is filled and pinned. Later
steps depend on these rates.

Some virtual machines get their memory only when it is first written. Writing it here
keeps that out of later timings.
"""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import torch
from step import STEPS, StepContext, argument_parser, run_part, start

# Memory of the largest step: 4 G parameters, 20 bytes each.
FILL_BYTES = 80e9
BLOCK_BYTES, PIN_BYTES = 1 << 30, 1 << 32
TINY_BYTES = 1 << 26


def meminfo() -> dict[str, int]:
    """Return MemTotal and the other entries in bytes."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    matches = (re.match(r"(\w+):\s+(\d+) kB", text) for text in lines)
    return {match[1]: int(match[2]) * 1024 for match in matches if match}


def fill(step: StepContext, fill_bytes: float, block_bytes: int) -> bool:
    """Fill host memory in a process of its own; return whether there was enough."""
    file = step.out / "memory.fill"
    words = [STEPS / "fill.py", str(fill_bytes), str(block_bytes), file]
    result = run_part(words, step.left_s() - 5)
    if file.exists():
        step.add(**json.loads(file.read_text()))
        file.unlink()
    if "why" in result:
        step.add(fill_ended=result["why"])
    return "why" not in result


def main() -> None:
    flags = argument_parser(__doc__)
    flags.add_argument(
        "--fill", type=float, default=FILL_BYTES, help="bytes to fill (default: 80e9)"
    )
    args = flags.parse_args()
    step = start(args)
    block_bytes = TINY_BYTES if step.rehearse else BLOCK_BYTES
    fill_bytes = 4 * block_bytes if step.rehearse else args.fill
    before = meminfo()
    step.add(total_bytes=before["MemTotal"], available_bytes=before["MemAvailable"])
    step.check(
        f"{fill_bytes / 1e9:.3g} GB of host memory", fill(step, fill_bytes, block_bytes)
    )
    if not torch.cuda.is_available():
        step.add(pin_bytes_per_s=None)
        return
    from ebbtide.interleave.engine.devices.cuda import CudaDevice

    device = CudaDevice(torch.device("cuda"))
    begin = time.perf_counter()
    pinned = device.allocate_host((PIN_BYTES,), torch.uint8)
    step.add(
        pin_bytes_per_s=PIN_BYTES / (time.perf_counter() - begin),
        pinned=pinned.is_pinned(),
    )


if __name__ == "__main__":
    main()
