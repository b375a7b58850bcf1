"""Stores that go to memory past the caches, for compiled loops that write what they do not read.

An ordinary store to a line that is in no cache reads the line first: writing beside the old state would move half as
much memory again. A streaming (non-temporal) store writes whole lines without reading them. LLVM chooses the
instruction: on x86 `movnt`, on a processor without any an ordinary store.
"""

# numba types these functions, for each combination of argument types.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import platform

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, register_jitable

LINE_BYTES = 64
_IS_X86 = platform.machine() in ("x86_64", "AMD64")


@intrinsic(prefer_literal=True)
def put(typing_context, target, target_first, source, source_first, length, streams):
    """Copy a constant number of elements, whole lines, between arrays of one type.

    Args:
        target: Where to write.
        target_first: The first element to write; if `streams`, a line of the cache begins there.
        source: What to write.
        source_first: The first element to read.
        length: How many elements.
        streams: Whether to write past the caches.
    """
    item_bytes = source.dtype.bitwidth // 8

    def generate(context, builder, signature, arguments):
        line = ir.VectorType(ir.IntType(8 * item_bytes), LINE_BYTES // item_bytes)
        lines = []
        for array_type, array, first in zip(signature.args[:4:2], arguments[:4:2], arguments[1:4:2], strict=True):
            begin = builder.gep(context.make_array(array_type)(context, builder, array).data, [first])
            lines.append(builder.bitcast(begin, line.as_pointer()))
        to, begin = lines
        # A line is one vector, which LLVM splits for the processor: its parts are stored one after the other, whatever
        # the width of vectors in the loop. Lines of which parts are stored at different times are slow.
        values = [
            builder.load(builder.gep(begin, [ir.IntType(32)(number)]), align=item_bytes)
            for number in range(length.literal_value * item_bytes // LINE_BYTES)
        ]
        with builder.if_else(arguments[5]) as branches:
            for branch, align in zip(branches, (LINE_BYTES, item_bytes), strict=True):
                with branch:
                    for number, value in enumerate(values):
                        store = builder.store(value, builder.gep(to, [ir.IntType(32)(number)]), align=align)
                        if align == LINE_BYTES:
                            hint = builder.module.add_metadata([ir.IntType(32)(1)])
                            store.set_metadata("nontemporal", hint)
        return context.get_dummy_value()

    return types.void(target, types.intp, source, types.intp, length, types.boolean), generate


@intrinsic
def fence(typing_context):
    """Order streaming stores before everything that this thread does from now on, such as releasing a lock.

    On other processors than x86 these stores need no more than a lock."""

    def generate(context, builder, signature, arguments):
        if _IS_X86:
            sfence = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, sfence, "llvm.x86.sse.sfence"), [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic(prefer_literal=True)
def stack_memory(typing_context, dtype, length):
    """Return a pointer to memory on the stack for a constant number of elements.

    LLVM knows that nothing else is in this memory."""

    def generate(context, builder, signature, arguments):
        memory = cgutils.alloca_once(builder, context.get_data_type(dtype.dtype), size=length.literal_value)
        memory.align = LINE_BYTES
        return memory

    return types.CPointer(dtype.dtype)(dtype, length), generate


@register_jitable
def is_line_begin(array, first):
    """Return whether an element begins a line of the cache."""
    return (array.ctypes.data + first * array.itemsize) % LINE_BYTES == 0


@register_jitable
def elements_before_line(array, first):
    """Return how many elements there are from an element to the first one that begins a line of the cache."""
    return -(array.ctypes.data + first * array.itemsize) % LINE_BYTES // array.itemsize
