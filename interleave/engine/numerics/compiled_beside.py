"""Loops that read the old optimizer state and write the new one beside it, compiled
like the loops in compiled.py.

They write past the caches where lines of a target are whole, and as usual elsewhere. A
state is a tuple of master and moments.

An ordinary store to a line that is in no cache reads the line first: writing beside the
old state would move half as much memory again. A streaming (non-temporal) store writes
whole lines without reading them. LLVM chooses the instruction: on x86 `movnt`, on a
processor without any an ordinary store.
"""

# numba types these functions, for each combination of argument types.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

import platform
from functools import cache

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic, register_jitable

from ebbtide.interleave.engine.numerics.compiled import (
    NEXT_PLACE,
    U,
    compile_loop,
    load,
    make_step,
    over_rows,
    place_of,
    save,
    step,
    store,
    with_functions,
)

LINE_BYTES = 64
_IS_X86 = platform.machine() in ("x86_64", "AMD64")

# Results wait on the stack until they fill lines of any type: this many elements, which
# LLVM computes side by side in registers.
_BLOCK = 32
# Elements of the largest state in a block: master and two moments.
_STACK = 3 * _BLOCK
_STATE_PER_LINE = LINE_BYTES // 4


@intrinsic(prefer_literal=True)
def put(typing_context, target, target_first, source, source_first, length, streams):
    """Copy a constant number of elements, whole lines, between arrays of one type.

    With `streams` this writes past the caches; then a line of the cache begins at
    `target_first`."""
    item_bytes = source.dtype.bitwidth // 8

    def generate(context, builder, signature, arguments):
        line = ir.VectorType(ir.IntType(8 * item_bytes), LINE_BYTES // item_bytes)
        lines = []
        for array_type, array, first in zip(
            signature.args[:4:2], arguments[:4:2], arguments[1:4:2], strict=True
        ):
            begin = builder.gep(
                context.make_array(array_type)(context, builder, array).data, [first]
            )
            lines.append(builder.bitcast(begin, line.as_pointer()))
        to, begin = lines
        # A line is one vector, which LLVM splits for the processor: its parts are
        # stored one after the other, whatever the width of vectors in the loop. Lines
        # are slow if their parts are stored at different times.
        values = [
            builder.load(builder.gep(begin, [ir.IntType(32)(number)]), align=item_bytes)
            for number in range(length.literal_value * item_bytes // LINE_BYTES)
        ]
        with builder.if_else(arguments[5]) as branches:
            for branch, align in zip(branches, (LINE_BYTES, item_bytes), strict=True):
                with branch:
                    for number, value in enumerate(values):
                        store = builder.store(
                            value,
                            builder.gep(to, [ir.IntType(32)(number)]),
                            align=align,
                        )
                        if align == LINE_BYTES:
                            hint = builder.module.add_metadata([ir.IntType(32)(1)])
                            store.set_metadata("nontemporal", hint)
        return context.get_dummy_value()

    return types.void(
        target, types.intp, source, types.intp, length, types.boolean
    ), generate


@intrinsic
def fence(typing_context):
    """Order streaming stores before everything that this thread does from now on.

    An example is releasing a lock.

    On other processors than x86 these stores need no more than a lock."""

    def generate(context, builder, signature, arguments):
        if _IS_X86:
            sfence = ir.FunctionType(ir.VoidType(), [])
            builder.call(
                cgutils.get_or_insert_function(
                    builder.module, sfence, "llvm.x86.sse.sfence"
                ),
                [],
            )
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic(prefer_literal=True)
def stack_memory(typing_context, dtype, length):
    """Return a pointer to memory on the stack for a constant number of elements.

    LLVM knows that nothing else is in this memory."""

    def generate(context, builder, signature, arguments):
        memory = cgutils.alloca_once(
            builder, context.get_data_type(dtype.dtype), size=length.literal_value
        )
        memory.align = LINE_BYTES
        return memory

    return types.CPointer(dtype.dtype)(dtype, length), generate


@intrinsic
def address(typing_context, array, index):
    """Return a pointer to an element."""

    def generate(context, builder, signature, arguments):
        return builder.gep(
            context.make_array(array)(context, builder, arguments[0]).data,
            [arguments[1]],
        )

    return types.CPointer(array.dtype)(array, types.intp), generate


@register_jitable
def is_line_begin(array, first):
    """Return whether an element begins a line of the cache."""
    return (array.ctypes.data + first * array.itemsize) % LINE_BYTES == 0


@register_jitable
def elements_before_line(array, first):
    """Return how many elements there are from an element to the first one that begins a
    line of the cache."""
    return -(array.ctypes.data + first * array.itemsize) % LINE_BYTES // array.itemsize


slice_rows = over_rows("rows, begin, end", "rows[K][begin:end]")
block_rows = over_rows(
    "rows, memory", "memory[K * _BLOCK : (K + 1) * _BLOCK]", _BLOCK=_BLOCK
)
# The same of rows with several types, each in memory of its own.
typed_rows = over_rows(
    "rows, memory",
    "carray(stack_memory(rows[K].dtype, _BLOCK), _BLOCK)",
    carray=carray,
    stack_memory=stack_memory,
    _BLOCK=_BLOCK,
)
are_line_begins = over_rows(
    "rows, first", "is_line_begin(rows[K], first)", is_line_begin=is_line_begin
)
put_rows = over_rows(
    "rows, first, sources, streams",
    "put(rows[K], first, sources[K], 0, _BLOCK, streams[K])",
    put=put,
    _BLOCK=_BLOCK,
)


def _update_elements(grad, old, new, out, scalars, position, begin, end):
    """Update elements with ordinary stores."""
    # In slices numba knows that no index is negative; without them the loop takes eight
    # times as long.
    grad, old, new = (
        grad[begin:end],
        slice_rows(old, begin, end),
        slice_rows(new, begin, end),
    )
    if out is not None:
        half = out[begin:end]
    place = place_of(position + begin)
    for i in range(grad.size):
        values = step(grad[i], load(old, i), scalars, place)
        store(new[0], i, values[0])
        save(new[1:], i, values[1:])
        if out is not None:
            store(half, i, values[0])
        place = U(place + NEXT_PLACE)


def _update_blocks(grad, old, new, out, scalars, position, begin, end):
    """Update elements of whole blocks with streaming stores."""
    results = block_rows(new, carray(stack_memory(np.float32, _STACK), _STACK))
    streams = are_line_begins(new, begin)
    if out is not None:
        half = carray(stack_memory(out.dtype, _BLOCK), _BLOCK)
        streams_half = is_line_begin(out, begin)
    place = place_of(position + begin)
    for block in range(begin, end, _BLOCK):
        g, old_rows = (
            grad[block : block + _BLOCK],
            slice_rows(old, block, block + _BLOCK),
        )
        for i in range(_BLOCK):
            values = step(g[i], load(old_rows, i), scalars, place)
            store(results[0], i, values[0])
            save(results[1:], i, values[1:])
            if out is not None:
                store(half, i, values[0])
            place = U(place + NEXT_PLACE)
        put_rows(new, block, results, streams)
        if out is not None:
            put(out, block, half, 0, _BLOCK, streams_half)


def _update(grad, old, new, out, scalars, position):
    size = grad.size
    begin = elements_before_line(new[0], 0)
    # A line of half-precision elements is as long as two of the state.
    if out is not None and elements_before_line(out, begin) == _STATE_PER_LINE:
        begin += _STATE_PER_LINE
    begin = min(begin, size)
    end = size - (size - begin) % _BLOCK
    _update_elements(grad, old, new, out, scalars, position, 0, begin)
    _update_blocks(grad, old, new, out, scalars, position, begin, end)
    _update_elements(grad, old, new, out, scalars, position, end, size)
    fence()


def _copy(old, new):
    begin = min(elements_before_line(new, 0), new.size)
    end = new.size - (new.size - begin) % _BLOCK
    streams = is_line_begin(new, begin)
    for i in range(begin):
        new[i] = old[i]
    for i in range(begin, end, _BLOCK):
        put(new, i, old, i, _BLOCK, streams)
    for i in range(end, new.size):
        new[i] = old[i]
    fence()


@cache
def update_of(rule):
    """Return the loop that updates the state of a rule out of place."""
    functions = {
        "step": make_step(rule),
        "block_rows": typed_rows if rule.rounds else block_rows,
    }
    parts = [
        register_jitable(with_functions(part, **functions))
        for part in (_update_elements, _update_blocks)
    ]
    return compile_loop(
        _update, rule=rule, _update_elements=parts[0], _update_blocks=parts[1]
    )


copy = compile_loop(_copy)
