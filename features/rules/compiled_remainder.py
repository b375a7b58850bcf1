"""Both parts of masters (remainder.py) for loops that numba compiles."""

# numba types these functions, for each combination of argument types.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

import numpy as np
from numba.extending import register_jitable

from ebbtide.interleave.engine.numerics.compiled import F, U


@register_jitable
def join(param, remainder):
    """Return the master of a parameter and its remainder."""
    low = U(remainder)
    upper = U(U(param) - U(low >> U(15)))
    return U(U(upper << U(16)) | low).view(F)


@register_jitable
def split(master):
    """Return the parameter and the remainder of a master."""
    # The bits of the one NaN are rounded to its parameter, with the remainder 0, like
    # the bits of a number.
    bits = F(master).view(U)
    return np.uint16(U(bits + U(0x8000)) >> U(16)), np.uint16(bits & U(0xFFFF))
