"""The loop of tensor_fingerprint.py that numba compiles. It is imported with the first
fingerprint of a CPU tensor."""

# numba types this function.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

import numpy as np
from numba.extending import register_jitable

from ebbtide.interleave.engine.numerics.compiled import compile_loop

_U = np.uint64
_MASK, _HALF = _U(0xFFFFFFFF), _U(32)


@register_jitable
def _add_block(sums, weight, words, low_keys, high_keys):
    first, second = _U(0), _U(0)
    for place in range(low_keys.size):
        word = words[place]
        low = (word + low_keys[place]) & _MASK
        high = ((word >> _HALF) + high_keys[place]) & _MASK
        first += low * high
        second += word
    sums[0] += (first ^ (first >> _HALF)) * weight
    sums[1] += (second ^ (second >> _HALF)) * weight


def _sum_blocks(words, low_keys, high_keys, factor, first_block):
    """Return both sums over the blocks of words, the first of them `first_block`."""
    sums = np.zeros(2, _U)
    size = low_keys.size
    whole = words.size // size
    for block in range(whole):
        weight = (_U(2) * _U(first_block + block) + _U(1)) * factor
        _add_block(
            sums, weight, words[block * size : (block + 1) * size], low_keys, high_keys
        )
    rest = words[whole * size :]
    if rest.size:
        filled = np.zeros(size, _U)
        filled[: rest.size] = rest
        _add_block(
            sums,
            (_U(2) * _U(first_block + whole) + _U(1)) * factor,
            filled,
            low_keys,
            high_keys,
        )
    return sums


sum_blocks = compile_loop(_sum_blocks)
