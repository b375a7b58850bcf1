"""The definition of moments in 8 bits: codes of elements, and a scale for each block of
`rule.BLOCK` elements.

    moment = number of the code in dynamic_type.py * scale
    scale  = the largest magnitude of the new moments of a block
    code   = that of the number next to moment / scale, of two as near the smaller one

Blocks are counted from the begin of a parameter; the last one may be shorter. All codes
of a block whose scale is 0, infinite or NaN are 0. Each product and quotient is rounded
once.
"""

from typing import Any

import numpy as np

from ebbtide.features.rules.dynamic_type import MIDDLES, VALUES
from ebbtide.interleave.engine.rules.rule import BLOCK


def widen_moment(codes: Any, scales: Any, number: int) -> Any:
    """Return the first moment (`number` 0) or the second one (1) in fp32, from its
    codes and scales."""
    return VALUES[number][codes] * np.repeat(scales, BLOCK)[: len(codes)]


def quantize_moment(moment: Any, number: int) -> tuple[Any, Any]:
    """Return codes and scales of a moment; its NaN are the one of reference.py."""
    blocks = np.pad(moment, (0, -len(moment) % BLOCK)).reshape(-1, BLOCK)
    # The bits of magnitudes have their order, and NaN comes last.
    scales = (
        (blocks.view(np.uint32) & np.uint32(0x7FFFFFFF))
        .max(axis=1, initial=0)
        .view(np.float32)
    )
    is_valid = (scales > 0) & (scales < np.inf)
    codes = np.searchsorted(
        MIDDLES[number], blocks / np.where(is_valid, scales, np.float32(1))[:, None]
    )
    return np.where(is_valid[:, None], codes, 0).reshape(-1)[: len(moment)].astype(
        np.uint8
    ), scales
