"""Random numbers for the rounding of moments to bfloat16, the same on every device and
for every division of work.

The random numbers of an element follow from the step and from its position in the
optimizer, and from nothing else:

    position = index in the flat parameter + number of the parameter * 0x9E3779B1
    bits     = mixed(position * 0x9E3779B1 xor mixed(seed))
    mixed(x) = the finalizer of MurmurHash3 for 32 bits

All arithmetic is modulo 2**32. The seed is the number of the step. The first moment
takes the lower 16 bits and the second one the upper 16: they are added to the bits of
the fp32 number, whose lower half is then cut off. So a number between two of bfloat16
becomes either with a probability that makes the mean the number itself. With a seed of
0, rounding is to nearest, ties to even.
"""

import numpy as np
import numpy.typing as npt

FACTOR = 0x9E3779B1
MIX_FACTORS = 0x85EBCA6B, 0xC2B2AE35

_Words = npt.NDArray[np.uint32]


def random_bits(seed: np.float32, position: int, count: int) -> _Words:
    """Return the random bits of elements from a position on.

    `position` is the position of the first element.
    """
    positions = np.arange(position, position + count, dtype=np.uint64).astype(np.uint32)
    return _mixed(
        positions * np.uint32(FACTOR)
        ^ _mixed(np.array([seed], np.float32).astype(np.uint32))
    )


def _mixed(words: _Words) -> _Words:
    words = (words ^ words >> np.uint32(16)) * np.uint32(MIX_FACTORS[0])
    words = (words ^ words >> np.uint32(13)) * np.uint32(MIX_FACTORS[1])
    return words ^ words >> np.uint32(16)
