"""Figures per iteration, as arrays that become a pandas frame on demand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ebbtide.analysis.timeseries.step_functions import Floats, Ints

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class IterationTable:
    """A row per iteration, a column per phase or quantity.

    Attributes:
        numbers: The iterations, ascending.
        columns: Values by name, one per iteration; NaN where not known.
    """

    numbers: Ints
    columns: Mapping[str, Floats]

    @property
    def frame(self) -> pd.DataFrame:
        """A pandas frame with the iterations as index."""
        import pandas as pd

        return pd.DataFrame(dict(self.columns), index=pd.Index(self.numbers, name="iteration"))

    def at(self, numbers: Sequence[int] | Ints) -> IterationTable:
        """Return the rows of some iterations, ascending; NaN for those that the table does not have."""
        wanted = np.asarray(numbers, np.int64)
        position, present = positions(self.numbers, wanted)
        columns = {name: np.full(len(wanted), np.nan) for name in self.columns}
        for name, values in columns.items():
            values[present] = self.columns[name][position[present]]
        return IterationTable(wanted, columns)

    def only(self, numbers: Iterable[int]) -> IterationTable:
        """Return the rows of those of some iterations that the table has."""
        kept = np.isin(self.numbers, list(numbers))
        return IterationTable(self.numbers[kept], {name: values[kept] for name, values in self.columns.items()})

    def largest(self, names: Sequence[str]) -> Floats:
        """Return the largest value of some columns in each iteration; NaN where none is known."""
        largest: Floats = np.fmax.reduce([self.columns[name] for name in names])
        return largest

    def total(self, names: Sequence[str]) -> Floats:
        """Return the sum of the known values of some columns in each iteration; 0 where none is."""
        total: Floats = np.sum([np.nan_to_num(self.columns[name]) for name in names], axis=0)
        return total


def positions(numbers: Ints, wanted: Ints) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """Return the position of each wanted number among ascending ones, and whether it is one of them."""
    position = np.minimum(np.searchsorted(numbers, wanted), max(len(numbers) - 1, 0))
    present = numbers[position] == wanted if len(numbers) else np.zeros(len(wanted), bool)
    return position, present


def sums(count: int, rows: Ints, values: Floats) -> Floats:
    """Return the sum of the values of each of `count` rows; 0 where there is none."""
    return np.bincount(rows, values, count).astype(np.float64)
