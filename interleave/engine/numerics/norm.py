"""The sum of squares of a gradient, with the same bits on every device and for every
division into subgroups.

The whole flat gradient of a parameter is split into blocks of 65,536 elements. The
elements of a block are assigned to 256 lanes in turn, each lane adds its squares in
order in float64, and the lanes are added by halves (the 129th to the first, and so on)
until one is left. The square of an fp32 number is exact in float64, so only these
additions round, and a fused multiply-add would change nothing. The sums of the blocks,
and the sums of several parameters, are added by `math.fsum`, which rounds once: their
order does not matter.
"""

import math
from collections.abc import Iterable

import numpy as np
import torch

BLOCK = 65_536
LANES = 256


def sum_of_squares(gradient: torch.Tensor) -> float:
    """Return the sum of squares of a gradient on the CPU, as defined above.

    `CpuKernel.sum_of_squares` is faster.

    It is finite exactly if all elements are: no sum of squares of fp32 numbers is too
    large for float64."""
    flat = gradient.detach().float().numpy().reshape(-1)
    padded = np.zeros(-(-flat.size // BLOCK) * BLOCK)
    padded[: flat.size] = flat
    rows = padded.reshape(-1, BLOCK // LANES, LANES)
    lanes = np.zeros((len(rows), LANES))
    with np.errstate(invalid="ignore"):
        # The others are zeros.
        for row in range(-(-min(flat.size, BLOCK) // LANES)):
            lanes += rows[:, row] * rows[:, row]
        while lanes.shape[1] > 1:
            half = lanes.shape[1] // 2
            lanes = lanes[:, :half] + lanes[:, half:]
    return total(lanes[:, 0])


def total(sums: Iterable[float]) -> float:
    """Return the sum over blocks or parameters, rounded once."""
    return math.fsum(sums)
