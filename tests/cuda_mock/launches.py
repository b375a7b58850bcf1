"""Records the launches of ebbtide's kernels on the mock of libcuda.so.1, with the tables that they get."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ebbtide.interleave.engine.numerics.triton_kernel import SharedHostMemory

Words = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Launch:
    """A launch of a kernel.

    Attributes:
        kernel: The name of the kernel.
        programs: The number of its programs.
        threads: The number of threads of each program.
        first_programs: The first program of each tensor of the table; empty for `load_table`.
        rows: The table's row for each tensor.
    """

    kernel: str
    programs: int
    threads: int
    first_programs: Words
    rows: Words


@dataclass
class LaunchRecorder:
    """Launches, and how often an event was waited for.

    Attributes:
        launches: All launches so far.
        waits: Number of waits for an event that was not passed yet.
        compiled: Names of the kernels of which a variant was compiled.
    """

    launches: list[Launch] = field(default_factory=list)
    waits: int = 0
    compiled: list[str] = field(default_factory=list)

    @property
    def kernels(self) -> list[str]:
        """The names of the kernels that were launched, in order."""
        return [launch.kernel for launch in self.launches]

    def clear(self) -> None:
        """Forget everything so far."""
        self.__init__()  # type: ignore[misc]

    def on_launch(self, name: str, programs: int, threads: int, arguments: Any) -> None:
        """Record a launch. A table is copied, like a GPU does; other kernels do nothing."""
        from ebbtide.interleave.engine.numerics import triton_compiled

        none = np.zeros(0, np.int64)
        if name == "load_table":
            source, target = (_argument(arguments, index, ctypes.c_uint64) for index in (0, 1))
            length = _argument(arguments, 2, ctypes.c_int32)
            ctypes.memmove(target, source, 8 * length)
            self.launches.append(Launch(name, programs, threads, none, none))
            return
        # The count of tensors comes after the table, or after the table and the results.
        is_update = name == "update"
        columns = _ADAMW_COLUMNS if is_update else triton_compiled.BLOCK_COLUMNS
        count = _argument(arguments, 1 if is_update else 2, ctypes.c_int32)
        address = _argument(arguments, 0, ctypes.c_uint64)
        words = np.frombuffer(ctypes.string_at(address, 8 * count * (1 + columns)), np.int64)
        self.launches.append(Launch(name, programs, threads, words[:count], words[count:].reshape(count, columns)))


# Length, addresses of five tensors, and nine factors in five words.
_ADAMW_COLUMNS = 11


def _argument(arguments: Any, index: int, kind: Any) -> int:
    return int(ctypes.cast(arguments[index], ctypes.POINTER(kind))[0])


class MockEvent:
    """An event of a stream that passes it only when the host waits for it, or for a later one."""

    recorder: LaunchRecorder
    _recorded = 0
    _passed = 0

    def __init__(self, blocking: bool) -> None:
        assert blocking

    def record(self) -> None:
        MockEvent._recorded += 1
        self._number = MockEvent._recorded

    def query(self) -> bool:
        return self._number <= MockEvent._passed

    def synchronize(self) -> None:
        MockEvent.recorder.waits += 1
        MockEvent._passed = max(MockEvent._passed, self._number)


class UnpinnedHostMemory(SharedHostMemory):
    """The host memory of launches on a GPU, without pinning it. It has zeros, as no kernel writes results."""

    def __init__(self) -> None:
        super().__init__(pinned=True)

    def allocate(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(count, dtype=dtype, device="cpu")
