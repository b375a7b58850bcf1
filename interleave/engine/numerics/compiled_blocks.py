"""The update with moments in 8 bits (blocks.py), compiled like the loops in compiled.py.

The results of a block wait on the stack, in fp32, until its scales are known, where LLVM computes them side by side in
registers. A code is that of a table for the upper bits of the quotient, or the next one: at most one middle between two
numbers has the same upper bits. The addition of the lower bits compares with it, by its carry.
"""

# numba types these functions, for each combination of argument types.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from functools import cache

import numpy as np
from numba import carray, types
from numba.extending import overload, register_jitable

from ebbtide.interleave.engine.numerics.compiled import (
    F,
    U,
    compile_loop,
    from_remainder,
    load,
    make_step,
    over_rows,
    save,
    step,
    store,
    to_remainder,
)
from ebbtide.interleave.engine.numerics.compiled_beside import slice_rows, stack_memory
from ebbtide.interleave.engine.rules.dynamic_type import MIDDLES, VALUES
from ebbtide.interleave.engine.rules.rule import BLOCK

_SIGNED = np.int32
_MAGNITUDE, _INFINITE = U(0x7FFFFFFF), U(0x7F800000)
# Magnitudes from 2**-24 on, below which there is no middle, by exponent and 7 bits of the fraction; up to 1.
_SHIFT, _FIRST, _LAST = U(16), (127 - 24) << 7, 127 << 7
_COUNT, _MOMENTS, _LOW = U(_LAST - _FIRST + 1), 2 * BLOCK, U(0xFFFF)


def _codes_and_steps(number):
    """Return the codes of the least quotients with the same upper bits, those of negative ones after the others.

    The lower 16 bits are what a quotient's own add a carry to if it is above the middle there."""
    words = MIDDLES[number].view(_SIGNED)
    # Integers in the order of the numbers: all bits but the sign of negative ones are inverted.
    middles = np.append(words ^ (words >> 31 & 0x7FFFFFFF), _SIGNED(0x7FFFFFFF))
    upper = np.arange(_FIRST, _LAST + 1, dtype=_SIGNED)
    upper = np.concatenate([upper, ~upper])
    codes = np.searchsorted(middles, upper << 16)
    following = middles[codes]
    return ((codes << 16) + np.where(following >> 16 == upper, ~following & 0xFFFF, 0)).astype(U)


_CODES = tuple(map(_codes_and_steps, range(len(MIDDLES))))


@register_jitable
def _quantize(moment, codes, scales, block, table):
    words = moment.view(U)
    largest = U(0)
    for i in range(codes.size):
        largest = max(largest, U(words[i] & _MAGNITUDE))
    scale = U(largest).view(F)
    scales[block] = scale
    if largest == U(0) or largest >= _INFINITE:
        codes[:] = 0
        return
    keys = carray(stack_memory(np.uint32, BLOCK), BLOCK)
    for i in range(codes.size):
        word = F(moment[i] / scale).view(U)
        key = U(max(_SIGNED(U(word & _MAGNITUDE) >> _SHIFT) - _SIGNED(_FIRST), _SIGNED(0)))
        keys[i] = U(key + U(_COUNT * U(word >> U(31))))
        words[i] = U(U(word ^ U(_SIGNED(word) >> _SIGNED(31))) & _LOW)
    for i in range(codes.size):
        codes[i] = np.uint8(U(table[keys[i]] + words[i]) >> _SHIFT)


@register_jitable
def _widen(moment, codes, scale, values):
    for i in range(codes.size):
        moment[i] = values[codes[i]] * scale


_widen_each = over_rows(
    "codes, moments, scales, block",
    "widen(moments[K], codes[K], scales[K][block], values[K])",
    widen=_widen,
    values=VALUES,
)
_quantize_each = over_rows(
    "codes, moments, scales, block",
    "quantize(moments[K], codes[K], scales[K], block, tables[K])",
    quantize=_quantize,
    tables=_CODES,
)
_stacks = over_rows("rows, memory", "memory[K * BLOCK : (K + 1) * BLOCK]", BLOCK=BLOCK)


def _load_master(masters, out, i):
    """Return a master, or that of a remainder and a parameter. The body is chosen by type, below."""


def _save_master(masters, out, i, value):
    """Store a master, or its remainder, and the parameter. The body is chosen by type, below."""


def _slice(out, begin, end):
    """Return elements of the parameter, None if there is none. The body is chosen by type, below."""


@overload(_slice)
def _choose_slice(out, begin, end):
    if isinstance(out, types.NoneType):
        return lambda out, begin, end: None
    return lambda out, begin, end: out[begin:end]


@overload(_load_master)
def _choose_load_master(masters, out, i):
    if masters.dtype.name == "uint16":
        return lambda masters, out, i: from_remainder(out[i], masters[i])
    return lambda masters, out, i: masters[i]


@overload(_save_master)
def _choose_save_master(masters, out, i, value):
    if masters.dtype.name == "uint16":

        def split(masters, out, i, value):
            out[i], masters[i] = to_remainder(value)

        return split

    def store_both(masters, out, i, value):
        masters[i] = value
        if out is not None:
            store(out, i, value)

    return store_both


def _update(grad, masters, codes, scales, out, scalars):
    new_masters, moments = (
        carray(stack_memory(np.float32, BLOCK), BLOCK),
        _stacks(codes, carray(stack_memory(np.float32, _MOMENTS), _MOMENTS)),
    )
    for block in range(scales[0].size):
        begin = block * BLOCK
        end = min(begin + BLOCK, grad.size)
        g, own, old, half = grad[begin:end], slice_rows(codes, begin, end), masters[begin:end], _slice(out, begin, end)
        _widen_each(own, moments, scales, block)
        for i in range(g.size):
            new = step(g[i], (_load_master(old, half, i), *load(moments, i)), scalars, 0)
            new_masters[i] = new[0]
            save(moments, i, new[1:])
        for i in range(g.size):
            _save_master(old, half, i, new_masters[i])
        _quantize_each(own, moments, scales, block)


@cache
def update_of(rule):
    """Return the loop that updates masters, codes and scales of a rule in place."""
    return compile_loop(_update, rule=rule, step=make_step(rule))
