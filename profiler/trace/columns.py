"""The rows of a table as NumPy arrays, without pandas.

To import pandas takes as long as a short command.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ebbtide.profiler.trace.schema import SORT, text_columns, typed_rows

if TYPE_CHECKING:
    import pandas as pd

Bools = npt.NDArray[np.bool_]
# Texts as positions among the different ones, -1 where one is missing, and the
# different ones.
Codes = tuple[npt.NDArray[Any], list[str]]


class Columns:
    """The rows of a table, sorted by time. Callers share the arrays and must not change
    them."""

    def __init__(self, table: str, rows: pa.Table | pd.DataFrame) -> None:
        """Take rows: an Arrow table as of `typed_rows`, or a frame of the table."""
        self._table = table
        self._kept: dict[str, Any] = {}
        if isinstance(rows, pa.Table):
            self._arrow = _sorted(table, rows)
            self.nbytes = rows.nbytes
            # A name that is not UTF-8 is to be refused where the file is read.
            for name in text_columns(table):
                self.codes(name)
        else:
            self.frame = rows
            self.nbytes = int(rows.memory_usage(index=False).sum())

    @cached_property
    def _arrow(self) -> pa.Table:
        return typed_rows(
            self._table, pa.Table.from_pandas(self.frame, preserve_index=False)
        )

    @cached_property
    def frame(self) -> pd.DataFrame:
        """The rows as a pandas frame."""
        from ebbtide.profiler.trace.frames import arrow_frame, empty_frame

        frame = (
            arrow_frame(self._table, self._arrow)
            if len(self)
            else empty_frame(self._table)
        )
        self.nbytes = max(self.nbytes, int(frame.memory_usage(index=False).sum()))
        return frame

    def __len__(self) -> int:
        return (
            len(self.frame) if "frame" in self.__dict__ else int(self._arrow.num_rows)
        )

    def ints(self, name: str) -> npt.NDArray[np.int64]:
        """Return a column of integers; any number where the value is missing."""
        values: npt.NDArray[np.int64] = self._once(
            name, lambda: _numbers(self._array(name))
        )
        return values

    def floats(self, name: str) -> npt.NDArray[np.float64]:
        """Return a column of numbers as floats; NaN where the value is missing."""
        return np.where(
            self.recorded(name), _numbers(self._array(name)).astype(np.float64), np.nan
        )

    def recorded(self, name: str) -> Bools:
        """Return which values of a column are not missing."""
        return _recorded(self._array(name))

    def matches(self, name: str, selects: Callable[[str], bool]) -> Bools:
        """Return which texts of a column a function of a text selects, never missing
        ones."""
        codes, labels = self.codes(name)
        return np.array([*map(selects, labels), False])[codes]

    def equal(self, name: str, text: str | None) -> Bools:
        """Return which texts of a column are the given one; none where that is None."""
        return self.matches(name, lambda label: label == text)

    def labels(self, name: str) -> list[str]:
        """Return the different texts of a column in order of appearance."""
        return distinct_texts(self._array(name))

    def texts(self, name: str) -> npt.NDArray[np.object_]:
        """Return a column of text; None where the value is missing."""
        codes, labels = self.codes(name)
        return np.array([*labels, None], object)[codes]

    def _array(self, name: str) -> pa.Array:
        return self._once(f"{name}:arrow", lambda: _one_array(self._arrow.column(name)))

    def codes(self, name: str) -> Codes:
        """Return the different texts of a column, and each value's position among them.

        The position is -1 where the value is missing.
        """
        codes: Codes = self._once(
            f"{name}:codes", lambda: _text_codes(self._array(name))
        )
        return codes

    def _once(self, key: str, compute: Callable[[], Any]) -> Any:
        if key not in self._kept:
            self._kept[key] = compute()
        return self._kept[key]


def _sorted(table: str, rows: pa.Table) -> pa.Table:
    # Row groups have dictionaries of their own: joined here, as arrays are, no column
    # is kept twice.
    rows = rows.combine_chunks()
    times = _numbers(_one_array(rows.column(SORT[table])))
    return (
        rows
        if (times[1:] >= times[:-1]).all()
        else rows.take(pa.array(np.argsort(times, kind="stable")))
    )


def _one_array(values: pa.ChunkedArray) -> pa.Array:
    """Return a column as one array; its chunks must share a dictionary."""
    if not values.num_chunks:
        return pa.nulls(0, values.type)
    return values.chunk(0) if values.num_chunks == 1 else values.combine_chunks()


def _text_codes(values: pa.Array) -> Codes:
    if pa.types.is_dictionary(values.type):
        codes = _numbers(values.indices)
        if values.indices.null_count:
            codes = np.where(_recorded(values.indices), codes, -1)
        labels = values.dictionary.to_pylist()
        # A dictionary may have a text twice.
        positions = {
            label: position for position, label in enumerate(dict.fromkeys(labels))
        }
        if len(positions) < len(labels):
            codes = np.array([*map(positions.__getitem__, labels), -1])[codes]
        return codes, list(positions)
    texts = values.to_pylist()
    positions = {text: position for position, text in enumerate(distinct_texts(values))}
    return np.array([positions.get(text, -1) for text in texts], np.int64), list(
        positions
    )


def distinct_texts(values: pa.Array | pa.ChunkedArray) -> list[str]:
    """Return the different texts of a column in order of appearance. A dictionary may
    have a text twice."""
    return [
        text for text in dict.fromkeys(values.unique().to_pylist()) if text is not None
    ]


def _numbers(values: pa.Array) -> npt.NDArray[Any]:
    """Return the numbers of an array without copying them.

    Arrow itself makes integers floats next to a missing one.
    """
    if not len(values):
        return np.empty(0, values.type.to_pandas_dtype())
    numbers = np.frombuffer(values.buffers()[1], values.type.to_pandas_dtype())
    return numbers[values.offset : values.offset + len(values)]


def _recorded(values: pa.Array) -> Bools:
    # Arrow's own conversion of booleans imports pandas.
    if not values.null_count:
        return np.ones(len(values), bool)
    bits = np.unpackbits(
        np.frombuffer(values.buffers()[0], np.uint8), bitorder="little"
    )
    return bits[values.offset : values.offset + len(values)].astype(bool)
