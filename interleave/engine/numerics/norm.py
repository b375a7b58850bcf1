"""The sum of a gradient's squares, to the same bits by every device and however the parameter is cut for its update.

A parameter's whole flat gradient is cut into blocks of 65,536; a block's elements are dealt to 256 lanes in turn, each
lane adds its squares in order in float64, and the lanes are added by halves (the 129th to the first, and so on) until
one is left. The square of an fp32 number is exact in float64, so only these additions round, and a fused multiply-add
would change nothing. The blocks' sums, and those of several parameters, are added by `math.fsum`, which rounds once:
their order does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import torch

BLOCK = 65_536
LANES = 256


def sum_of_squares(gradient: torch.Tensor) -> float:
    """Of a gradient on the CPU, as written down above; `CpuKernel.sum_of_squares` is the same, faster. It is finite
    exactly where all of the gradient is: no sum of squares of fp32 numbers is too large for float64."""
    flat = gradient.detach().float().numpy().reshape(-1)
    padded = np.zeros(-(-flat.size // BLOCK) * BLOCK)
    padded[: flat.size] = flat
    rows = padded.reshape(-1, BLOCK // LANES, LANES)
    lanes = np.zeros((len(rows), LANES))
    with np.errstate(invalid="ignore"):
        for row in range(BLOCK // LANES):
            lanes += rows[:, row] * rows[:, row]
        while lanes.shape[1] > 1:
            half = lanes.shape[1] // 2
            lanes = lanes[:, :half] + lanes[:, half:]
    return total(lanes[:, 0])


def total(sums: Iterable[float]) -> float:
    """Of blocks or of parameters; rounded once."""
    return math.fsum(sums)
