"""Both parts of masters (remainder.py) for the kernel of a GPU. Importing this module
needs triton."""

# Triton types these functions.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def join(param, remainder):
    """Return the masters of parameters and their remainders."""
    upper = param.to(tl.uint32) - (remainder.to(tl.uint32) >> 15)
    return ((upper << 16) | remainder.to(tl.uint32)).to(tl.float32, bitcast=True)


@triton.jit
def split(master):
    """Return the parameters and the remainders of masters."""
    # The bits of the one NaN are rounded to its parameter, with the remainder 0, like
    # the bits of a number.
    bits = master.to(tl.uint32, bitcast=True)
    return ((bits + 0x8000) >> 16).to(tl.uint16), (bits & 0xFFFF).to(tl.uint16)
