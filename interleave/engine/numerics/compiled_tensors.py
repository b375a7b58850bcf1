"""The loop of tensor_fingerprint.py that numba compiles. It is imported with the first fingerprint of a CPU tensor."""

# numba types this function.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

import numpy as np
from numba.extending import register_jitable

from ebbtide.interleave.engine.numerics.compiled import compile_loop
from ebbtide.interleave.engine.numerics.tensor_fingerprint import BLOCK, FACTOR

_U = np.uint64
_MASK, _HALF = _U(0xFFFFFFFF), _U(32)
_FACTOR = _U(FACTOR)


@register_jitable
def _product(low, high, low_key, high_key):
    return ((low + low_key) & _MASK) * ((high + high_key) & _MASK)


@register_jitable
def _add_block(sums, block, words, keys):
    first, second = _U(0), _U(0)
    for place in range(BLOCK):
        low, high = words[place] & _MASK, words[place] >> _HALF
        first += _product(low, high, keys[0, place], keys[1, place])
        second += _product(low, high, keys[2, place], keys[3, place])
    weight = (_U(2) * _U(block) + _U(1)) * _FACTOR
    sums[0] += (first ^ (first >> _HALF)) * weight
    sums[1] += (second ^ (second >> _HALF)) * weight


def _sum_blocks(words, keys, first_block):
    """Return both sums over the blocks of words, of which the first has this number."""
    sums = np.zeros(2, _U)
    whole = words.size // BLOCK
    for block in range(whole):
        _add_block(sums, first_block + block, words[block * BLOCK : (block + 1) * BLOCK], keys)
    rest = words[whole * BLOCK :]
    if rest.size:
        filled = np.zeros(BLOCK, _U)
        filled[: rest.size] = rest
        _add_block(sums, first_block + whole, filled, keys)
    return sums


sum_blocks = compile_loop(_sum_blocks)
