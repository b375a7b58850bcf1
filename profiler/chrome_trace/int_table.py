"""Columns of integers, for what there may be millions of."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pandas as pd

Ints = npt.NDArray[np.int64]


class Rows:
    """Rows of integers, gathered piece by piece and kept small: 8 bytes a value."""

    def __init__(self, *names: str) -> None:
        self._names = names
        self._pieces = [np.empty((0, len(names)), np.int64)]

    def add(self, *columns: npt.ArrayLike) -> None:
        """Add rows, given as their columns."""
        self._pieces.append(np.column_stack(columns))

    def table(self) -> pd.DataFrame:
        """All rows so far."""
        return pd.DataFrame(np.concatenate(self._pieces), columns=[*self._names])
