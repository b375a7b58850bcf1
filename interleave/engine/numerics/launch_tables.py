"""Tables of tensors for launches on a GPU, and the host memory that kernels read and write directly.

A table is a flat tensor of int64: for each tensor the first of the launch's programs that work on it, then for each
tensor a row of columns (triton_compiled.py says which). A tensor without elements has no programs.

Kernels read tables from pinned host memory and write small results there. A copy of these few bytes would wait for the
copies of whole subgroups that are in flight in the same direction.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch


class SharedHostMemory:
    """Allocates host memory for launches, and keeps it until they are done.

    Args:
        pinned: Whether a GPU uses the memory. If not, launches are done when their call returns.
    """

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._in_flight: deque[tuple[torch.cuda.Event, tuple[torch.Tensor, ...]]] = deque()
        self._lock = threading.Lock()

    def allocate(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat tensor with any values. It is freed like any other tensor, so launches must `keep` it."""
        return torch.empty(count, dtype=dtype, device="cpu", pin_memory=self._pinned)

    def keep(self, *memory: torch.Tensor) -> Callable[[], None]:
        """Keep memory until the work on the current stream so far is done; return a function that waits for that."""
        if not self._pinned:
            return lambda: None
        done = torch.cuda.Event(blocking=True)
        done.record()
        with self._lock:
            self._in_flight.append((done, memory))
            while self._in_flight and self._in_flight[0][0].query():
                self._in_flight.popleft()
        return lambda: None if done.query() else done.synchronize()


def table_words(programs: Sequence[int], rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the words of a table.

    Args:
        programs: The number of programs for each tensor.
        rows: The columns of each tensor, of shape (tensors, columns).
    """
    first_programs = list(itertools.accumulate(programs, initial=0))[:-1]
    return np.concatenate([np.array(first_programs, np.int64), rows.reshape(-1)])


def scalar_columns(scalars: Sequence[Sequence[np.float32]]) -> npt.NDArray[np.int64]:
    """Return the fp32 scalars of each tensor as columns, two in each word, of shape (tensors, columns)."""
    values = np.array(scalars, np.float32)
    return np.pad(values, ((0, 0), (0, values.shape[1] % 2))).view(np.int64)
