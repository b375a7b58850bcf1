"""Columns of a table that would take too much memory as arrays."""

import copy
import io
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

# Rows that are read at a time, and the size up to which a column stays in memory.
_BLOCK_ROWS = 1 << 18
_MAX_BYTES_IN_MEMORY = 8 << 20


class StoredColumn:
    """Numbers in a temporary file, which are added from the last to the first. Slices are arrays of `values(numbers)`.

    `most_rows`: the most numbers that will be added."""

    ndim = 1

    def __init__(self, dtype: str, most_rows: int, values: Callable[[npt.NDArray[Any]], Any] = np.asarray) -> None:
        self._dtype, self._values = np.dtype(dtype), values
        self._most_rows, self.size = most_rows, 0
        large = most_rows * self._dtype.itemsize > _MAX_BYTES_IN_MEMORY
        self._file = tempfile.TemporaryFile() if large else io.BytesIO()  # noqa: SIM115

    def prepend(self, numbers: npt.ArrayLike) -> None:
        """Add numbers before the others."""
        data = np.ascontiguousarray(numbers, self._dtype)
        self.size += len(data)
        self._file.seek((self._most_rows - self.size) * self._dtype.itemsize)
        self._file.write(data.tobytes())

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, rows: Any) -> Any:
        if not isinstance(rows, slice):
            return self[rows : rows + 1][0]
        start, stop, _ = rows.indices(self.size)
        size = self._dtype.itemsize
        self._file.seek((self._most_rows - self.size + start) * size)
        return self._values(np.frombuffer(self._file.read(max(stop - start, 0) * size), self._dtype))

    def __add__(self, offset: int) -> "StoredColumn":
        """Return the column with a number added to each value."""
        column = copy.copy(self)
        column._values = lambda numbers: self._values(numbers) + offset
        return column


def blocks_of(column: Any) -> Iterator[Any]:
    """Yield the values of a column: those of a stored one some rows at a time."""
    if not isinstance(column, StoredColumn):
        yield column
        return
    for start in range(0, len(column), _BLOCK_ROWS):
        yield column[start : start + _BLOCK_ROWS]
