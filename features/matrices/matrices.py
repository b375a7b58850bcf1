"""The update of a whole matrix.

Its products have one order, so that nothing but the matrix decides about the bits.

The formula of the rule gives a matrix U and the new moments, element by element. With
three coefficients a, b and c,

    X = U, or its transpose if it has more rows than columns, over its norm (at least eps)
    as often as the rule says:   G = X Xt,   X = a X + (b G + c (G G)) X

Then the rule's `finish` updates the master with X in place of a gradient. An element of
a product is the sum of its fp32 products from the first to the last, beginning with 0,
each operation rounded. Norms are computed by norm.py.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from ebbtide.interleave.engine.rules.rule import Scalars

Multiply = Callable[[Any, Any], Any]


class MatrixParts(NamedTuple):
    """The factors of an update: of the formula, of the products and of `finish`."""

    scalars: Scalars
    coefficients: tuple[np.float32, np.float32, np.float32]
    steps: int
    eps: np.float32
    finish_scalars: Scalars


def multiply(a: Any, b: Any) -> Any:
    """Return the product of two matrices, as defined above."""
    product = np.zeros((len(a), b.shape[1]), np.float32)
    for number in range(len(b)):
        product += a[:, number : number + 1] * b[number]
    return product


def orthogonalize(
    direction: torch.Tensor,
    shape: tuple[int, int],
    parts: MatrixParts,
    multiply: Multiply,
    sum_of_squares: Callable[[torch.Tensor], float],
) -> None:
    """Replace U of a shape, flat, by X."""
    matrix, (a, b, c) = direction.numpy().reshape(shape), parts.coefficients
    norm = np.float32(math.sqrt(sum_of_squares(direction)))
    x = matrix.T if shape[0] > shape[1] else matrix
    # NaN and overflow are ordinary results here.
    with np.errstate(all="ignore"):
        x = np.ascontiguousarray(x) / np.maximum(norm, parts.eps)
        for _ in range(parts.steps):
            gram = multiply(x, np.ascontiguousarray(x.T))
            polynomial = b * gram + c * multiply(gram, gram)
            x = a * x + multiply(polynomial, x)
    matrix[...] = x.T if shape[0] > shape[1] else x
