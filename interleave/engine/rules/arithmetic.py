"""Functions that formulas of rules call, for NumPy.

The kernels have their own with the same bits.
"""

from typing import Any

import numpy as np


def divide(dividend: Any, divisor: Any) -> Any:
    """Return the quotient, rounded to nearest."""
    return np.divide(dividend, divisor)


def square_root(value: Any) -> Any:
    """Return the root, rounded to nearest."""
    return np.sqrt(value)


def sign(value: Any) -> Any:
    """Return 1, -1, or 0 without a sign; NaN of NaN."""
    one = np.float32(1)
    return np.where(value > 0, one, np.where(value < 0, -one, value - value))
