"""Loops that numba compiles. This module is imported with the first kernel, since numba
takes long to import.

The loops are serial and run without the GIL: kernels.py runs them on slices, on its own
threads. bfloat16 arrays are passed as uint16 and float16 arrays as int16, so that the
type of an array says what it contains.

The loops give the bits of the reference because numba sets no fast-math flag of LLVM
unless `fastmath` asks for it, and without the flag `contract` LLVM fuses no
multiply-add and uses no approximate quotient or root (a test reads the compiled code).
All conversions work on bits, by additions of integers, so they do not depend on the
processor.
"""

# numba types these functions, for each combination of argument types.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

import re
from functools import cache
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
from numba import njit, types
from numba.core.errors import TypingError
from numba.extending import overload, register_jitable

import ebbtide
from ebbtide.interleave.engine.numerics.fingerprint import BLOCK as FINGERPRINT_BLOCK
from ebbtide.interleave.engine.numerics.norm import BLOCK, LANES
from ebbtide.interleave.engine.numerics.reference import FLOAT16_NAN, NAN
from ebbtide.interleave.engine.numerics.rounding import FACTOR, MIX_FACTORS

_OPTIONS = {"nogil": True, "error_model": "numpy"}
# Digest of all code that the loops may call.
_ROOT = Path(ebbtide.__file__).parent
_PATTERNS = (
    "interleave/engine/numerics/*.py",
    "interleave/engine/rules/*.py",
    "features/*/*.py",
)
_FILES = sorted(file for pattern in _PATTERNS for file in _ROOT.glob(pattern))
_SOURCES = sha256(b"".join(file.read_bytes() for file in _FILES)).hexdigest()[:8]

F = np.float32
U = np.uint32
_NAN, _FLOAT16_NAN = U(NAN), U(FLOAT16_NAN)
_INFINITE = U(0x7F800000)
NEXT_PLACE = _FACTOR = U(FACTOR)
_FIRST_MIX_FACTOR, _SECOND_MIX_FACTOR = map(U, MIX_FACTORS)
_MAGNITUDE = U(0x7FFFFFFF)
_LOW, _HALF_WORD = np.uint64(0xFFFFFFFF), np.uint64(32)
# Difference between the exponents of float32 and float16.
_BIAS = U((127 - 15) << 23)
_LEAST_NORMAL, _LEAST_NORMAL_BITS = F(2.0**-14), U((127 - 14) << 23)
# Its last bit has the weight of the last bit of a subnormal float16: the addition
# rounds to that bit.
_HALF, _HALF_BITS = F(0.5), U(126 << 23)


def _canonical_nan(value):
    """Return a result of a formula, with the one NaN."""


@overload(_canonical_nan)
def _choose_canonical_nan(value):
    if value != types.float32:
        raise TypingError(
            "a formula computes in double precision: it must have literals in "
            "comparisons only"
        )

    def canonical_nan(value):
        # Comparing bits takes two instructions more.
        return U(_NAN if value != value else F(value).view(U)).view(F)

    return canonical_nan


@register_jitable
def _from_bfloat16(stored):
    return U(U(stored) << U(16)).view(F)


@register_jitable
def _to_bfloat16(value):
    return _to_bfloat16_by(value, U(U(0x7FFF) + U(U(F(value).view(U) >> U(16)) & U(1))))


@register_jitable
def _to_bfloat16_by(value, noise):
    # The one NaN becomes bfloat16's NaN, whatever the noise.
    return np.uint16(U(F(value).view(U) + noise) >> U(16))


@register_jitable
def _from_float16(stored):
    bits = U(np.uint16(stored))
    size = U(U(bits & U(0x7FFF)) << U(13))
    normal = U(size + _BIAS)
    # An exponent above the range of float16 is an infinity or a NaN.
    wide = U(normal + _BIAS) if size >= U(0x7C00 << 13) else normal
    small = F(U(size + _LEAST_NORMAL_BITS).view(F) - _LEAST_NORMAL).view(U)
    return U(
        U(small if size < U(0x0400 << 13) else wide) | U(U(bits & U(0x8000)) << U(16))
    ).view(F)


@register_jitable
def _to_float16(value):
    bits = F(value).view(U)
    size = U(bits & _MAGNITUDE)
    normal = U(U(U(U(size - _BIAS) + U(0xFFF)) + U(U(size >> U(13)) & U(1))) >> U(13))
    small = U(F(size.view(F) + _HALF).view(U) - _HALF_BITS)
    half = U(small if size < _LEAST_NORMAL_BITS else normal)
    half = U(U(0x7C00) if size >= U((127 + 16) << 23) else half)
    half = U(half | U(U(bits >> U(16)) & U(0x8000)))
    return np.int16(_FLOAT16_NAN if size > _INFINITE else half)


def _widen(stored):
    """Return the value of a gradient as float32, exactly. The body is chosen by type,
    below."""


def store(array, i, value):
    """Round a result of a step to the type of the array and store. The body is chosen
    by type, below."""


@register_jitable
def _identity(value):
    return value


_FROM = {"uint16": _from_bfloat16, "int16": _from_float16, "float32": _identity}
_TO = {"uint16": _to_bfloat16, "int16": _to_float16, "float32": _identity}


@overload(_widen)
def _choose_widen(stored):
    convert = _FROM[stored.name]
    return lambda stored: convert(stored)


@overload(store)
def _choose_store(array, i, value):
    convert = _TO[array.dtype.name]

    def convert_and_store(array, i, value):
        array[i] = convert(value)

    return convert_and_store


def over_rows(arguments, body, **names):
    """Return a compiled function that does the same with each row.

    Rows are rows of its first argument.

    The body is an expression, and the result a tuple, or a statement. K in it stands
    for the index of the row. So LLVM sees the operations of each row, and no loop over
    rows."""
    rows = arguments.partition(",")[0]

    def choose(count):
        parts = [re.sub(r"\bK\b", str(row), body) for row in range(count)]
        code = (
            "; ".join(parts)
            if " = " in body
            else f"return ({''.join(f'{part}, ' for part in parts)})"
        )
        exec(f"def over_{count}_rows({arguments}): {code or 'pass'}", names)
        return names[f"over_{count}_rows"]

    function = eval(f"lambda {arguments}: None")
    overload(function, inline="always")(
        eval(f"lambda {arguments}: choose(len({rows}.types))", {"choose": choose})
    )
    return function


load = over_rows("rows, i", "rows[K][i]")
save = over_rows("rows, i, values", "rows[K][i] = values[K]")
_canonical = over_rows("values", "canonical(values[K])", canonical=_canonical_nan)
_widen_each = over_rows("values", "widen(values[K])", widen=_widen)


@register_jitable
def _scrambled(value):
    value = U(U(value ^ U(value >> U(16))) * _FIRST_MIX_FACTOR)
    value = U(U(value ^ U(value >> U(13))) * _SECOND_MIX_FACTOR)
    return U(value ^ U(value >> U(16)))


@register_jitable
def _random_bits(seed, place):
    return _scrambled(U(place ^ _scrambled(seed)))


@register_jitable
def place_of(position):
    """Return what random bits take for the position of an element. The next one has
    `NEXT_PLACE` more."""
    return U(U(position) * NEXT_PLACE)


@register_jitable
def _to_moment(value, noise, is_random):
    return (
        _to_bfloat16_by(value, U(noise & U(0xFFFF)))
        if is_random
        else _to_bfloat16(value)
    )


_round_each = over_rows(
    "values, noise, is_random",
    "to_moment(values[K], U(noise >> U(16 * K)), is_random)",
    to_moment=_to_moment,
    U=U,
)


@register_jitable
def _divide(dividend, divisor):
    return dividend / divisor


@register_jitable
def _sign(value):
    if value > F(0):
        return F(1)
    if value < F(0):
        return F(-1)
    return value - value


_ARITHMETIC = {
    "divide": _divide,
    "square_root": register_jitable(lambda value: np.sqrt(value)),
    "sign": _sign,
}


@cache
def make_step(rule):
    """Return a function for loops that gives the new master and moments.

    Its arguments are (stored gradient, state, factors, place).
    """
    formula = register_jitable(rule.formula_with(_ARITHMETIC))

    @register_jitable
    def step(stored, state, scalars, place):
        g = _widen(stored) * scalars[0]
        return _canonical(formula(g, *(state + scalars[1:])))

    @register_jitable
    def step_and_round(stored, state, scalars, place):
        g = _widen(stored) * scalars[0]
        new = _canonical(formula(g, *(_widen_each(state) + scalars[1:-1])))
        seed = U(scalars[-1])
        moments = _round_each(new[1:], _random_bits(seed, place), seed > U(0))
        return (new[0], *moments)

    return step_and_round if rule.rounds else step


def step(stored, state, scalars, place):
    """Stands for the step of a rule in the loops (see `make_step`)."""


def _update(grad, rows, out, scalars, first):
    place = place_of(first)
    for i in range(grad.size):
        new = step(grad[i], load(rows, i), scalars, place)
        save(rows, i, new)
        store(out, i, new[0])
        place = U(place + NEXT_PLACE)


def _update_state(grad, masters, moments, scalars, first):
    place = place_of(first)
    for i in range(grad.size):
        new = step(grad[i], (masters[i], *load(moments, i)), scalars, place)
        # They may be a parameter in half precision.
        store(masters, i, new[0])
        save(moments, i, new[1:])
        place = U(place + NEXT_PLACE)


def join(param, stored):
    """Stands for the function of a rule that returns a master of both its parts."""


def split(master):
    """Stands for the function of a rule that returns both parts of a master."""


def _update_split(grad, masters, moments, param, scalars, first):
    place = place_of(first)
    for i in range(masters.size):
        new = step(
            grad[i], (join(param[i], masters[i]), *load(moments, i)), scalars, place
        )
        param[i], masters[i] = split(new[0])
        save(moments, i, new[1:])
        place = U(place + NEXT_PLACE)


def _block_sums(grad, sums):
    lanes = np.empty(LANES, np.float64)
    for block in range(sums.size):
        lanes[:] = 0
        end = min((block + 1) * BLOCK, grad.size)
        for begin in range(block * BLOCK, end, LANES):
            # In a slice numba knows that no index is negative; without it the loop
            # takes eight times as long.
            row = grad[begin : min(begin + LANES, end)]
            for lane in range(row.size):
                value = np.float64(_widen(row[lane]))
                lanes[lane] += value * value
        width = LANES // 2
        while width:
            for lane in range(width):
                lanes[lane] += lanes[lane + width]
            width //= 2
        sums[block] = lanes[0]


def _fingerprint(words, keys, sums):
    for block in range(sums.shape[0]):
        # As in `_block_sums`.
        row = words[
            block * FINGERPRINT_BLOCK : min((block + 1) * FINGERPRINT_BLOCK, words.size)
        ]
        for number in range(sums.shape[1]):
            low_keys, high_keys = keys[number]
            total = np.uint64(0)
            for place in range(row.size):
                low = (row[place] + low_keys[place]) & _LOW
                total += low * (((row[place] >> _HALF_WORD) + high_keys[place]) & _LOW)
            sums[block, number] = total


def with_functions(code, **functions):
    """Return a function whose code calls other functions by these names."""
    return FunctionType(code.__code__, {**code.__globals__, **functions}, code.__name__)


def compile_loop(loop, **functions):
    """Compile a loop on its first call for each combination of types.

    Cache it on disk if a folder is writable.

    It calls the functions by these names; `rule` is no function but a rule, whose name
    the cached file has."""
    rule = functions.pop("rule", None)
    # numba compiles a cached loop again if its own file has changed, but not if one has
    # that the loop calls: so the name of the cached file stands for all of them.
    loop = with_functions(loop, **functions)
    loop.__qualname__ = f"{loop.__name__}_{'' if rule is None else rule.name.replace('-', '_')}_{_SOURCES}"
    try:
        return njit(**_OPTIONS, cache=True)(loop)
    except RuntimeError:  # numba has no folder that it can write to.
        return njit(**_OPTIONS)(loop)


@cache
def loops_of(rule):
    """Return the loops of a rule."""
    functions = {"rule": rule, "step": make_step(rule)}
    if rule.split is not None:
        parts = import_module(rule.split.loops)
        return Loops(
            update_split=compile_loop(
                _update_split, join=parts.join, split=parts.split, **functions
            )
        )
    return Loops(
        compile_loop(_update, **functions), compile_loop(_update_state, **functions)
    )


class Loops(NamedTuple):
    """The compiled loops of a rule: with a parameter, the state alone, and with masters
    in two parts."""

    update: Any = None
    update_state: Any = None
    update_split: Any = None


block_sums = compile_loop(_block_sums)
fingerprint = compile_loop(_fingerprint)
