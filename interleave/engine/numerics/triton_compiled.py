"""Functions that Triton compiles.

Each kernel works on all tensors of a table (launch_tables.py) in one launch.

A kernel has one variant for each combination of dtypes, whatever the number, the
lengths and the alignment of the tensors: all of them are in the table. A block that is
whole and starts at multiples of 16 bytes is read and written by wide instructions
without a mask, any other block element by element.
"""

# triton types these functions, for each combination of argument types.
# ruff: noqa: RUF005 (Triton has no starred elements)
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"

from __future__ import annotations

from functools import cache

import triton
import triton.language as tl

from ebbtide.interleave.engine.numerics.fingerprint import BLOCK as FINGERPRINT_BLOCK
from ebbtide.interleave.engine.numerics.norm import BLOCK, LANES
from ebbtide.interleave.engine.numerics.reference import BFLOAT16_NAN, FLOAT16_NAN, NAN
from ebbtide.interleave.engine.numerics.rounding import FACTOR, MIX_FACTORS
from ebbtide.interleave.engine.rules.rule import BLOCK as SCALED_BLOCK

# Columns of the tables' rows, of all kernels but the update.
BLOCK_COLUMNS = 3
# Elements that a program updates. Four for each thread: the widest access to fp32, and
# no exchange between threads.
UPDATE_BLOCK = 1024
UPDATE_WARPS = UPDATE_BLOCK // (32 * 4)
# Words of a table that a program copies.
TABLE_BLOCK = 1024

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_NAN = tl.constexpr(NAN)
_BFLOAT16_NAN = tl.constexpr(BFLOAT16_NAN)
_FLOAT16_NAN = tl.constexpr(FLOAT16_NAN)
_FACTOR = tl.constexpr(FACTOR)
_FIRST_MIX_FACTOR, _SECOND_MIX_FACTOR = map(tl.constexpr, MIX_FACTORS)
_BLOCK_COLUMNS = tl.constexpr(BLOCK_COLUMNS)
_UPDATE_BLOCK = tl.constexpr(UPDATE_BLOCK)
_TABLE_BLOCK = tl.constexpr(TABLE_BLOCK)
# Elements of a block with a scale.
_SCALED = tl.constexpr(SCALED_BLOCK)
_BLOCK = tl.constexpr(BLOCK)
_LANES = tl.constexpr(LANES)
_HALVINGS = tl.constexpr(LANES.bit_length() - 1)
_FINGERPRINT_BLOCK = tl.constexpr(FINGERPRINT_BLOCK)
# Integers that the threads of a program read at once, two each.
_FINGERPRINT_LANES = tl.constexpr(256)
# Rows of lanes whose loads are in flight together.
_UNROLLED = tl.constexpr(8)
# Bytes of the widest access.
_WIDE = tl.constexpr(16)


@triton.jit
def _find_tensor(table, count):
    """Return the index of the tensor that this program works on.

    `table` has the first program of each tensor.
    """
    first = 0
    end = count
    while end - first > 1:
        middle = (first + end) // 2
        is_later = tl.load(table + middle) > tl.program_id(0)
        first = tl.where(is_later, first, middle)
        end = tl.where(is_later, middle, end)
    return first


@triton.jit
def _pointer(address, dtype: tl.constexpr):
    return address.to(tl.pointer_type(dtype), bitcast=True)


@triton.jit
def _canonical_nan(value):
    bits = value.to(tl.uint32, bitcast=True)
    return tl.where(value != value, _NAN, bits).to(tl.float32, bitcast=True)


@triton.jit
def _widen(stored):
    # bfloat16 is passed as uint16, so that devices without bfloat16 can run this too.
    if stored.dtype == tl.uint16:
        wide = (stored.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        wide = stored.to(tl.float32)
    return wide


@triton.jit
def _round(value, dtype: tl.constexpr):
    if dtype == tl.uint16:
        bits = value.to(tl.uint32, bitcast=True)
        half = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        result = tl.where(value != value, _BFLOAT16_NAN, half).to(tl.uint16)
    elif dtype == tl.float16:
        half = value.to(tl.float16).to(tl.uint16, bitcast=True)
        result = (
            tl.where(value != value, _FLOAT16_NAN, half)
            .to(tl.uint16)
            .to(tl.float16, bitcast=True)
        )
    else:
        result = value
    return result


@triton.jit
def _quotient(dividend, divisor):
    # Not tl.div_rn and tl.sqrt_rn: Triton 3.4 and 3.5 compile them to instructions that
    # flush subnormals to zero. The interpreter has no assembly.
    if _INTERPRETED:
        result = tl.div_rn(dividend, divisor)
    else:
        divisor = tl.broadcast_to(divisor, dividend.shape)
        result = tl.inline_asm_elementwise(
            "div.rn.f32 $0, $1, $2;",
            "=f,f,f",
            [dividend, divisor],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    return result


@triton.jit
def _root(value):
    if _INTERPRETED:
        result = tl.sqrt_rn(value)
    else:
        result = tl.inline_asm_elementwise(
            "sqrt.rn.f32 $0, $1;",
            "=f,f",
            [value],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    return result


@triton.jit
def _sign(value):
    return tl.where(value > 0, 1.0, tl.where(value < 0, -1.0, value - value))


@triton.jit
def _scrambled(words):
    words = (words ^ (words >> 16)) * _FIRST_MIX_FACTOR
    words = (words ^ (words >> 13)) * _SECOND_MIX_FACTOR
    return words ^ (words >> 16)


@triton.jit
def _round_moment(value, noise, seed):
    bits = value.to(tl.uint32, bitcast=True)
    noise = tl.where(seed > 0, noise & 0xFFFF, 0x7FFF + ((bits >> 16) & 1))
    return tl.where(value != value, _BFLOAT16_NAN, (bits + noise) >> 16).to(tl.uint16)


@cache
def formula_of(rule):
    """Return the formula of a rule, compiled. The interpreter looks for `tl` in the
    globals of a function."""
    return triton.jit(
        rule.formula_with(
            {"divide": _quotient, "square_root": _root, "sign": _sign, "tl": tl}
        )
    )


@triton.jit
def _scale_and_codes(moment, inside, middles):
    bits = tl.where(inside, moment.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
    largest = tl.max(tl.reshape(bits, (_UPDATE_BLOCK // _SCALED, _SCALED)), 1)
    largest = tl.broadcast_to(
        largest[:, None], (_UPDATE_BLOCK // _SCALED, _SCALED)
    ).reshape((_UPDATE_BLOCK,))
    quotient = _quotient(moment, largest.to(tl.float32, bitcast=True))
    code = tl.zeros((_UPDATE_BLOCK,), tl.int32)
    for halving in tl.static_range(8):
        middle = tl.load(middles + code + ((128 >> halving) - 1))
        code += tl.where(quotient > middle, 128 >> halving, 0)
    is_valid = (largest > 0) & (largest < 0x7F800000)
    return largest.to(tl.float32, bitcast=True), tl.where(is_valid, code, 0).to(
        tl.uint8
    )


@triton.jit
def _update_block(
    grad,
    rows,
    out,
    scalars,
    mask,
    positions,
    blocks,
    out_dtype: tl.constexpr,
    master_dtype: tl.constexpr,
    join: tl.constexpr,
    split: tl.constexpr,
    formula: tl.constexpr,
    factors: tl.constexpr,
    rounds: tl.constexpr,
):
    g = _widen(tl.load(grad, mask=mask)) * tl.load(scalars)
    master = tl.load(rows[0], mask=mask)
    master = (
        join(tl.load(out, mask=mask), master) if join is not None else _widen(master)
    )
    values = (master,)
    for row in tl.static_range(1, len(rows)):
        if len(blocks) > 0:
            number = (
                blocks[1] + 512 * (row - 1) + tl.load(rows[row], mask=mask).to(tl.int32)
            )
            values = values + (
                tl.load(number, mask=blocks[0])
                * tl.load(blocks[1 + row], mask=blocks[0]),
            )
        else:
            values = values + (_widen(tl.load(rows[row], mask=mask)),)
    for factor in tl.static_range(1, factors - rounds):
        values = values + (tl.load(scalars + factor),)
    results = formula(g, *values)
    if rounds:
        seed = tl.load(scalars + factors - 1)
        noise = _scrambled((positions * _FACTOR) ^ _scrambled(seed.to(tl.uint32)))
        for row in tl.static_range(1, len(rows)):
            tl.store(
                rows[row],
                _round_moment(results[row], noise >> (16 * (row - 1)), seed),
                mask=mask,
            )
    elif len(blocks) > 0:
        for row in tl.static_range(1, len(rows)):
            moment = _canonical_nan(results[row])
            scale, codes = _scale_and_codes(
                moment, blocks[0], blocks[1] + (512 * (row - 1) + 256)
            )
            tl.store(rows[row], codes, mask=mask)
            # All elements of the block have read the old one, which the new one depends
            # on.
            tl.store(
                blocks[1 + row], scale, mask=blocks[0] & (positions % _SCALED == 0)
            )
    else:
        for row in tl.static_range(1, len(rows)):
            tl.store(rows[row], _canonical_nan(results[row]), mask=mask)
    p = _canonical_nan(results[0])
    if split is not None:
        param, rest = split(p)
        tl.store(rows[0], rest, mask=mask)
        tl.store(out, param, mask=mask)
    else:
        tl.store(rows[0], _round(p, master_dtype), mask=mask)
        tl.store(out, _round(p, out_dtype), mask=mask)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["table"])
def update(
    table,
    count,
    grad_dtype: tl.constexpr,
    out_dtype: tl.constexpr,
    master_dtype: tl.constexpr,
    join: tl.constexpr,
    split: tl.constexpr,
    formula: tl.constexpr,
    moments: tl.constexpr,
    factors: tl.constexpr,
    rounds: tl.constexpr,
    scaled: tl.constexpr,
):
    """Update all tensors of a table, in blocks of `UPDATE_BLOCK`. `join` and `split`:
    of masters in two parts (see SplitMaster), or None.

    Columns of a row: length; addresses of gradient, parameter, master and moments;
    factors, two in each word; with `rounds` the position of the first element, where
    moments are bfloat16; with `scaled`, where moments are codes (see blocks.py), the
    addresses of numbers and middles of each moment, 256 each, and of the scales of each
    moment."""
    tensor = _find_tensor(table, count)
    columns: tl.constexpr = 4 + moments + (factors + 1) // 2
    row = (
        table
        + count
        + tensor.to(tl.int64) * (columns + rounds + scaled * (1 + moments))
    )
    begin = (tl.program_id(0) - tl.load(table + tensor)) * _UPDATE_BLOCK
    offsets = tl.arange(0, _UPDATE_BLOCK)
    length, grad_address = tl.load(row), tl.load(row + 1)
    out_address, master_address = tl.load(row + 2), tl.load(row + 3)
    grad = _pointer(grad_address, grad_dtype) + begin
    out = _pointer(out_address, out_dtype) + begin
    rows = (_pointer(master_address, master_dtype) + begin,)
    addresses = grad_address | out_address | master_address
    for moment in tl.static_range(moments):
        address = tl.load(row + 4 + moment)
        rows = rows + (
            _pointer(
                address, tl.uint8 if scaled else tl.uint16 if rounds else tl.float32
            )
            + begin,
        )
        addresses |= address
    scalars = (row + 4 + moments).to(tl.pointer_type(tl.float32), bitcast=True)
    wide = ()
    narrow = ()
    for number in tl.static_range(1 + moments):
        wide = wide + (tl.multiple_of(rows[number], _WIDE) + offsets,)
        narrow = narrow + (rows[number] + offsets,)
    positions = begin + offsets
    inside = positions < length
    blocks = ()
    if scaled:
        blocks = (inside, _pointer(tl.load(row + columns), tl.float32))
        for moment in tl.static_range(moments):
            scales = _pointer(tl.load(row + columns + 1 + moment), tl.float32)
            blocks = blocks + (scales + positions // _SCALED,)
    if rounds:
        positions = (tl.load(row + columns) + positions).to(tl.uint32)
    if (addresses % _WIDE == 0) & (begin + _UPDATE_BLOCK <= length):
        wide_grad, wide_out = (
            tl.multiple_of(grad, _WIDE) + offsets,
            tl.multiple_of(out, _WIDE) + offsets,
        )
        _update_block(
            wide_grad,
            wide,
            wide_out,
            scalars,
            None,
            positions,
            blocks,
            out_dtype,
            master_dtype,
            join,
            split,
            formula,
            factors,
            rounds,
        )
    else:
        _update_block(
            grad + offsets,
            narrow,
            out + offsets,
            scalars,
            inside,
            positions,
            blocks,
            out_dtype,
            master_dtype,
            join,
            split,
            formula,
            factors,
            rounds,
        )


@triton.jit
def _add_by_halves(lanes):
    # A sum of two numbers does not depend on their order, so the order of all additions
    # is the order in norm.py.
    for halving in tl.static_range(_HALVINGS):
        lanes = tl.sum(lanes.reshape((2, _LANES >> (halving + 1))), 0)
    return tl.sum(lanes, 0)


@triton.jit(
    do_not_specialize=["count"], do_not_specialize_on_alignment=["table", "sums"]
)
def block_sums(table, sums, count, dtype: tl.constexpr):
    """Write the sums of squares of all blocks of a table's tensors, added in the order
    of norm.py.

    Columns of a row: address of the gradient; length; index of the tensor's first block
    in `sums`.
    """
    tensor = _find_tensor(table, count)
    row = table + count + tensor.to(tl.int64) * _BLOCK_COLUMNS
    block = tl.program_id(0) - tl.load(table + tensor)
    begin = block * _BLOCK
    address, length = tl.load(row), tl.load(row + 1)
    values = _pointer(address, dtype) + begin
    lane = tl.arange(0, _LANES)
    lanes = tl.zeros((_LANES,), tl.float64)
    if (address % _WIDE == 0) & (begin + _BLOCK <= length):
        pointers = tl.multiple_of(values, _WIDE) + lane
        for _ in range(_BLOCK // _LANES // _UNROLLED):
            for unrolled in tl.static_range(_UNROLLED):
                value = _widen(tl.load(pointers + unrolled * _LANES)).to(tl.float64)
                lanes += value * value
            pointers += _UNROLLED * _LANES
    else:
        for row_begin in range(0, tl.minimum(length - begin, _BLOCK), _LANES):
            offsets = row_begin + lane
            value = _widen(
                tl.load(values + offsets, mask=begin + offsets < length, other=0)
            ).to(tl.float64)
            lanes += value * value
    tl.store(sums + tl.load(row + 2) + block, _add_by_halves(lanes))


@triton.jit
def _key_products(words, keys):
    low = words.to(tl.uint32) + tl.load(keys)
    high = (words >> 32).to(tl.uint32) + tl.load(keys + _FINGERPRINT_BLOCK)
    return low.to(tl.uint64) * high.to(tl.uint64)


@triton.jit(
    do_not_specialize=["count"],
    do_not_specialize_on_alignment=["table", "fingerprints"],
)
def block_fingerprints(table, fingerprints, count, keys):
    """Write the sums of fingerprint.py for all blocks of all tensors of a table.

    Columns of a row: address; length, in units of 16 bits; index of the tensor's first
    block in `fingerprints`."""
    tensor = _find_tensor(table, count)
    row = table + count + tensor.to(tl.int64) * _BLOCK_COLUMNS
    block = tl.program_id(0) - tl.load(table + tensor)
    begin = block * _FINGERPRINT_BLOCK
    address, length = tl.load(row), tl.load(row + 1)
    lane = tl.arange(0, _FINGERPRINT_LANES)
    first_keys = tl.multiple_of(_pointer(keys, tl.uint32), _WIDE) + lane
    second_keys = first_keys + 2 * _FINGERPRINT_BLOCK
    first, second = (
        tl.zeros((_FINGERPRINT_LANES,), tl.uint64),
        tl.zeros((_FINGERPRINT_LANES,), tl.uint64),
    )
    if (address % _WIDE == 0) & (4 * (begin + _FINGERPRINT_BLOCK) <= length):
        pointers = tl.multiple_of(_pointer(address, tl.uint64) + begin, _WIDE) + lane
        for row_begin in tl.static_range(0, _FINGERPRINT_BLOCK, _FINGERPRINT_LANES):
            words = tl.load(pointers + row_begin)
            first += _key_products(words, first_keys + row_begin)
            second += _key_products(words, second_keys + row_begin)
    else:
        for row_begin in range(
            0,
            tl.minimum(length // 4 + 1 - begin, _FINGERPRINT_BLOCK),
            _FINGERPRINT_LANES,
        ):
            quarters = 4 * (begin + row_begin + lane)
            words = tl.zeros((_FINGERPRINT_LANES,), tl.uint64)
            for quarter in tl.static_range(4):
                offsets = quarters + quarter
                values = tl.load(
                    _pointer(address, tl.uint16) + offsets,
                    mask=offsets < length,
                    other=0,
                )
                words |= values.to(tl.uint64) << (16 * quarter)
            first += tl.where(
                quarters < length, _key_products(words, first_keys + row_begin), 0
            )
            second += tl.where(
                quarters < length, _key_products(words, second_keys + row_begin), 0
            )
    results = fingerprints + 2 * (tl.load(row + 2) + block)
    tl.store(results, tl.sum(first, 0).to(tl.int64, bitcast=True))
    tl.store(results + 1, tl.sum(second, 0).to(tl.int64, bitcast=True))


@triton.jit(
    do_not_specialize=["length"], do_not_specialize_on_alignment=["host_table", "table"]
)
def load_table(host_table, table, length):
    """Copy a table of that many words from host memory to the device."""
    offsets = tl.program_id(0) * _TABLE_BLOCK + tl.arange(0, _TABLE_BLOCK)
    mask = offsets < length
    tl.store(table + offsets, tl.load(host_table + offsets, mask=mask), mask=mask)
