"""A kernel in Triton, which reads the source of its functions from a file."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


@triton.jit
def double(source: Any, target: Any, width: Any, BLOCK: tl.constexpr) -> None:
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    row = tl.program_id(0) * width
    tl.store(
        target + row + columns,
        2 * tl.load(source + row + columns, mask=inside),
        mask=inside,
    )
