"""The update with moments in 8 bits (blocks.py), compiled like the loops in
compiled.py.

The results of a block wait on the stack, in fp32, until its scales are known. A code is
the table's entry for the upper 16 bits of the quotient, or the next one: at most one
middle between two numbers has the same upper bits. The addition of the lower bits
compares with it, by its carry. What LLVM computes side by side in registers and what it
looks up one by one are loops of their own, over whole blocks of constant length.
"""

# numba types these functions, for each combination of argument types.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from functools import cache, partial

import numpy as np
from numba import carray
from numba.extending import register_jitable

from ebbtide.features.rules.dynamic_type import MIDDLES, VALUES
from ebbtide.interleave.engine.numerics.compiled import (
    F,
    U,
    compile_loop,
    load,
    make_step,
    over_rows,
    save,
    step,
    store,
    with_functions,
)
from ebbtide.interleave.engine.numerics.compiled_beside import (
    address,
    slice_rows,
    stack_memory,
)
from ebbtide.interleave.engine.rules.rule import BLOCK

_SIGNED = np.int32
_MAGNITUDE, _INFINITE = U(0x7FFFFFFF), U(0x7F800000)
_SHIFT, _LOW, _MOMENTS = U(16), U(0xFFFF), 2 * BLOCK
# Upper bits of quotients: up to the upper bits of -1.
_COUNT = 0xBF81


def _codes_and_steps(number):
    """Return the codes of the least quotients with the same upper bits, by these.

    The lower 16 bits are what a quotient's own add a carry to if it is above the middle
    there."""
    words = MIDDLES[number].view(_SIGNED)
    # Integers in the order of the numbers: all bits but the sign of negative ones are
    # inverted.
    middles = np.append(words ^ (words >> 31 & 0x7FFFFFFF), _SIGNED(0x7FFFFFFF))
    upper = np.arange(_COUNT, dtype=np.uint16).view(np.int16).astype(_SIGNED)
    upper ^= upper >> 31 & 0x7FFF
    codes = np.searchsorted(middles, upper << 16)
    following = middles[codes]
    return (
        (codes << 16) + np.where(following >> 16 == upper, ~following & 0xFFFF, 0)
    ).astype(U)


# They are arguments: as constants they would be in each file of a compiled loop.
_CODES = tuple(map(_codes_and_steps, range(len(MIDDLES))))


@register_jitable(forceinline=True)
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
    for i in range(codes.size):
        moment[i] = moment[i] / scale
    entries = carray(stack_memory(np.uint32, BLOCK), BLOCK)
    for i in range(codes.size):
        entries[i] = table[words[i] >> _SHIFT]
    for i in range(codes.size):
        low = U(U(words[i] ^ U(_SIGNED(words[i]) >> _SIGNED(31))) & _LOW)
        codes[i] = np.uint8(U(entries[i] + low) >> _SHIFT)


@register_jitable(forceinline=True)
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
    "codes, moments, scales, block, tables",
    "quantize(moments[K], codes[K], scales[K], block, tables[K])",
    quantize=_quantize,
)
_store_each = over_rows("rows, i, value", "store(rows[K], i, value)", store=store)
_stacks = over_rows("rows, memory", "memory[K * BLOCK : (K + 1) * BLOCK]", BLOCK=BLOCK)
# Whole blocks of arrays, from an element on: of constant length, and not counted as
# references.
whole_blocks = over_rows(
    "rows, begin",
    "carray(address(rows[K], begin), BLOCK)",
    carray=carray,
    address=address,
    BLOCK=BLOCK,
)


def _update_block(grad, masters, codes, scales, out, scalars, tables, block):
    new_masters, moments = (
        carray(stack_memory(np.float32, BLOCK), BLOCK),
        _stacks(codes, carray(stack_memory(np.float32, _MOMENTS), _MOMENTS)),
    )
    _widen_each(codes, moments, scales, block)
    for i in range(grad.size):
        new = step(grad[i], (masters[i], *load(moments, i)), scalars, U(0))
        new_masters[i] = new[0]
        save(moments, i, new[1:])
    for i in range(grad.size):
        masters[i] = new_masters[i]
        _store_each(out, i, new_masters[i])
    _quantize_each(codes, moments, scales, block, tables)


def _update(tables, grad, masters, codes, scales, out, scalars):
    size = grad.size
    whole = size // BLOCK
    for block in range(whole):
        begin = block * BLOCK
        (g, own), old, half = (
            whole_blocks((grad, masters), begin),
            whole_blocks(codes, begin),
            whole_blocks(out, begin),
        )
        _update_block(g, own, old, scales, half, scalars, tables, block)
    if whole < scales[0].size:
        begin = whole * BLOCK
        old, half = slice_rows(codes, begin, size), slice_rows(out, begin, size)
        _update_block(
            grad[begin:], masters[begin:], old, scales, half, scalars, tables, whole
        )


@cache
def update_of(rule):
    """Return the loop that updates masters, codes and scales of a rule in place.

    `out` is a tuple of one parameter or none."""
    block = register_jitable(forceinline=True)(
        with_functions(_update_block, step=make_step(rule))
    )
    return partial(compile_loop(_update, rule=rule, _update_block=block), _CODES)
