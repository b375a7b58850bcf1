"""The definition of an update whose master has a remainder.

The master is a bfloat16 parameter and the remainder of its rounding.

An fp32 master has the bits of its parameter above, and 16 further bits, the remainder,
below. So the optimizer state takes 10 B per parameter instead of 12: the parameter is
on the device already. With `bits` of the master:

    remainder = bits & 0xFFFF
    parameter = (bits + 0x8000) >> 16         to nearest, ties away from zero; infinite beyond its range
    bits      = (parameter - (remainder >> 15)) << 16 | remainder

This rounding can be undone, to nearest even cannot: a parameter does not tell to which
side a tie went. Parameters differ from the results of reference.py where a master is
exactly between two of them; the update itself is the same.

- A finite master that rounds to infinity has an infinite parameter and a remainder of
  0x8000 or more, so it comes back. An infinite master has the remainder 0.
- Every NaN becomes the parameter 0x7FC0 with the remainder 0: rounded like numbers,
  some would become infinite or zero.
- A parameter that somebody else has written starts with the remainder 0: the master is
  the parameter.
"""

import numpy as np
import numpy.typing as npt
import torch

Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.uint16]
# The one quiet NaN of bfloat16.
_NAN = np.uint16(0x7FC0)


def split(masters: Floats) -> tuple[Halves, Halves]:
    """Return the parameters and the remainders of masters as the bits of bfloat16 and
    uint16."""
    bits = masters.view(np.uint32)
    is_nan = np.isnan(masters)
    # Without NaN the addition carries up to infinity at most.
    rounded = (np.where(is_nan, np.uint32(0), bits) + np.uint32(0x8000)) >> np.uint32(
        16
    )
    parameters = np.where(is_nan, _NAN, rounded.astype(np.uint16))
    return parameters, np.where(is_nan, np.uint16(0), bits.astype(np.uint16))


def join(parameters: Halves, remainders: Halves) -> Floats:
    """Return the masters of the parameters (bits of bfloat16) and remainders that
    `split` has returned."""
    upper = (parameters - (remainders >> np.uint16(15))).astype(np.uint32)
    masters: Floats = (upper << np.uint32(16) | remainders).view(np.float32)
    return masters


def split_tensor(masters: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the parameters (bfloat16) and the remainders (int16) of masters.

    The masters are fp32 on the CPU; see `split`.
    """
    parameters, remainders = map(torch.from_numpy, split(masters.numpy()))
    return parameters.view(torch.bfloat16), remainders.view(torch.int16)


def join_tensors(parameters: torch.Tensor, remainders: torch.Tensor) -> torch.Tensor:
    """Return the masters (fp32) of parameters (bfloat16) and remainders (int16) on the
    CPU; see `join`."""
    halves = (
        tensor.detach().view(torch.uint16).numpy()
        for tensor in (parameters, remainders)
    )
    return torch.from_numpy(join(*halves))
