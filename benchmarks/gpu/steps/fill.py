"""Fills host memory, and writes to a JSON file after each block how much it has filled.
`memory.py` runs it.

    python fill.py BYTES BLOCK_BYTES FILE

It asks nothing before: the memory of some virtual machines grows as it is used. Where
there is too little, the kernel ends this process first, and the file has what it had
filled.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from memory import meminfo


def main() -> None:
    fill_bytes, block_bytes, file = (
        float(sys.argv[1]),
        int(sys.argv[2]),
        Path(sys.argv[3]),
    )
    Path("/proc/self/oom_score_adj").write_text("1000")
    blocks: list[torch.Tensor] = []
    filled = 0
    begin = time.perf_counter()
    while filled < fill_bytes:
        blocks.append(torch.empty(block_bytes, dtype=torch.uint8).fill_(1))
        filled += block_bytes
        rate = filled / (time.perf_counter() - begin)
        new = file.with_suffix(".new")
        total = meminfo()["MemTotal"]
        new.write_text(
            json.dumps(
                {
                    "filled_bytes": filled,
                    "fill_bytes_per_s": rate,
                    "total_bytes_after": total,
                }
            )
        )
        new.replace(file)
    print("{}")


if __name__ == "__main__":
    main()
