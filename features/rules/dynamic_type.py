"""The data type of 8-bit moments: `dynamic` of Dettmers et al. (arXiv:2110.02861), with
the bits of bitsandbytes.

A code stands for one of 256 sorted numbers. The numbers of the first moment are 0, 1
and both signs of the middles of 1, 2, 4, ... 64 equal parts of a decade, from 1e-6 to
1: the largest decade has the most. The numbers of the second moment have no sign and
twice as many parts. A block of elements has a scale, its largest magnitude, with which
they are multiplied.
"""

import numpy as np
import numpy.typing as npt

_DECADES = 7
_FIRST = np.float32(0.1)


def _values(signed: bool) -> npt.NDArray[np.float32]:
    values = [0.0, 1.0]
    for decade in range(_DECADES):
        parts = 2 ** (decade if signed else decade + 1)
        width, numbers = (
            np.float64((np.float32(1) - _FIRST) / np.float32(parts)),
            np.arange(parts + 1),
        )
        # Counted from the nearer end, in double precision, and then rounded.
        edges = np.where(
            2 * numbers < parts, _FIRST + width * numbers, 1 - width * (parts - numbers)
        ).astype(np.float32)
        middles = np.float32(10.0 ** (decade - _DECADES + 1)) * (
            (edges[1:] + edges[:-1]) / np.float32(2)
        )
        values += [*middles, *-middles] if signed else [*middles]
    return np.sort(np.array(values)).astype(np.float32)


# By moment: the numbers of the codes, and the numbers in the middle between them.
VALUES = _values(True), _values(False)
MIDDLES = tuple((values[1:] + values[:-1]) * np.float32(0.5) for values in VALUES)
