"""Fingerprints of parameters, which show that somebody has changed them: 32 bits from all bits of a tensor.

The memory of the tensor is read as unsigned integers of 16 bits. They are split into blocks of 65,536, and those of a
block are assigned to 1,024 lanes in turn. All arithmetic is modulo 2**32. For each lane, from its first integer to its
last, sum = sum * 0x9E3779B1 + integer. The fingerprint is the sum over all lanes of all blocks of

    weight(block) * weight(lane) * mixed(sum)
    weight(i) = (w xor (w >> 16)) or 1, w = i * 0x9E3779B1
    mixed(s) = t xor (t >> 16), t = (s xor (s >> 16)) * 0x85EBCA6B

All factors are odd and `mixed` is one-to-one, so the change of a single integer always shows. Changes of many cancel
with a probability of about 2**-32. Since factors depend on the position, exchanged elements show as well. This is no
cryptographic hash.
"""

import numpy as np
import numpy.typing as npt
import torch

BLOCK, LANES = 65_536, 1_024
FACTOR, MIX_FACTOR = 0x9E3779B1, 0x85EBCA6B

_Words = npt.NDArray[np.uint32]


def fingerprint(values: torch.Tensor) -> int:
    """Return the fingerprint of a flat CPU tensor, bfloat16, float16 or float32; `CpuKernel.fingerprint` is faster."""
    words = values.detach().view(torch.uint16).numpy().astype(np.uint32)
    lane_weights = _weights(LANES)
    total = 0
    for block, block_weight in enumerate(_weights(-(-len(words) // BLOCK)).tolist()):
        sums = np.zeros(LANES, np.uint32)
        end = min(len(words), (block + 1) * BLOCK)
        for begin in range(block * BLOCK, end, LANES):
            row = words[begin : min(begin + LANES, end)]
            sums[: len(row)] = sums[: len(row)] * np.uint32(FACTOR) + row
        total += block_weight * int((_mixed(sums) * lane_weights).sum(dtype=np.uint32))
    return total % 2**32


def _weights(count: int) -> _Words:
    products = np.arange(count, dtype=np.uint32) * np.uint32(FACTOR)
    return (products ^ products >> np.uint32(16)) | np.uint32(1)


def _mixed(sums: _Words) -> _Words:
    products = (sums ^ sums >> np.uint32(16)) * np.uint32(MIX_FACTOR)
    return products ^ products >> np.uint32(16)
