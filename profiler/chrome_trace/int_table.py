"""Compact tables of integers for millions of events."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pandas as pd

IntArray = npt.NDArray[np.int64]


class IntTable:
    """Table of int64 columns that grows by blocks of rows and takes 8 bytes per value.

    Args:
        names: Names of the columns.
    """

    def __init__(self, *names: str) -> None:
        self._names = names
        self._blocks = [np.empty((0, len(names)), np.int64)]

    def add(self, *columns: npt.ArrayLike) -> None:
        """Append rows.

        Args:
            columns: One array per column, all of the same length.
        """
        self._blocks.append(np.column_stack(columns))

    def table(self) -> pd.DataFrame:
        """Return all rows so far. Do not change them."""
        # One block afterwards: the small ones would double the memory.
        self._blocks = [np.concatenate(self._blocks)]
        return pd.DataFrame(self._blocks[0], columns=[*self._names])
