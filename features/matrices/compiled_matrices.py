"""The product of matrices in the order of matrices.py, compiled like the loops in
compiled.py."""

# numba types these functions, for each combination of argument types.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

import numpy as np
from numba import carray

from ebbtide.interleave.engine.numerics.compiled import compile_loop
from ebbtide.interleave.engine.numerics.compiled_beside import stack_memory

# Elements of a product that are computed together, on the stack, and products that are
# added to each of them in turn.
ROWS, _COLUMNS, _TERMS = 32, 256, 8
_TILE = ROWS * _COLUMNS


def _multiply(a, b, product):
    sums = carray(stack_memory(np.float32, _TILE), _TILE)
    rows, terms = a.shape
    last = terms - terms % _TERMS
    for top in range(0, rows, ROWS):
        bottom = min(rows, top + ROWS)
        for left in range(0, product.shape[1], _COLUMNS):
            columns = b[:, left : left + _COLUMNS]
            width = columns.shape[1]
            sums[:] = 0
            # LLVM sees that the sums share no memory with the matrices, and computes
            # them side by side in registers.
            for term in range(0, last, _TERMS):
                b0, b1, b2, b3 = (
                    columns[term],
                    columns[term + 1],
                    columns[term + 2],
                    columns[term + 3],
                )
                b4, b5, b6, b7 = (
                    columns[term + 4],
                    columns[term + 5],
                    columns[term + 6],
                    columns[term + 7],
                )
                for row in range(top, bottom):
                    f = a[row, term : term + _TERMS]
                    own = sums[(row - top) * _COLUMNS : (row - top) * _COLUMNS + width]
                    f0, f1, f2, f3, f4, f5, f6, f7 = (
                        f[0],
                        f[1],
                        f[2],
                        f[3],
                        f[4],
                        f[5],
                        f[6],
                        f[7],
                    )
                    for i in range(own.size):
                        total = (
                            own[i] + f0 * b0[i] + f1 * b1[i] + f2 * b2[i] + f3 * b3[i]
                        )
                        own[i] = (
                            total + f4 * b4[i] + f5 * b5[i] + f6 * b6[i] + f7 * b7[i]
                        )
            for term in range(last, terms):
                for row in range(top, bottom):
                    own = sums[(row - top) * _COLUMNS : (row - top) * _COLUMNS + width]
                    for i in range(own.size):
                        own[i] += a[row, term] * columns[term, i]
            for row in range(top, bottom):
                product[row, left : left + width] = sums[
                    (row - top) * _COLUMNS : (row - top) * _COLUMNS + width
                ]


multiply = compile_loop(_multiply)
