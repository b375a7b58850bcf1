"""Records the launches of ebbtide's kernels by Triton's launcher, with the tables that
they get."""

import ctypes
from dataclasses import dataclass, field

import numpy as np
import torch

from ebbtide.interleave.engine.numerics.triton_kernel import SharedHostMemory
from tests.cuda_runtime.triton_launches import DriverLaunch, Words


@dataclass(frozen=True)
class Launch:
    """A launch of a kernel.

    Attributes:
        kernel: The name of the kernel.
        programs: The number of its programs.
        threads: The number of threads of each program.
        first_programs: The first program of each tensor of the table; empty for
            `load_table`.
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

    def on_launch(self, launch: DriverLaunch) -> None:
        """Record a launch. A table is copied, like a GPU does; other kernels do
        nothing."""
        none = np.zeros(0, np.int64)
        tables, arguments = (none, none), launch.arguments
        if launch.kernel == "load_table":
            ctypes.memmove(
                arguments["table"], arguments["host_table"], 8 * arguments["length"]
            )
        else:
            words = np.frombuffer(
                ctypes.string_at(arguments["table"], launch.table_bytes), np.int64
            )
            tables = launch.rows(words)
        self.launches.append(
            Launch(launch.kernel, launch.programs, launch.threads, *tables)
        )


class MockEvent:
    """An event of a stream that passes it only when the host waits for it, or for a
    later one."""

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
    """The host memory of launches on a GPU, without pinning it. It has zeros, as no
    kernel writes results."""

    def __init__(self) -> None:
        super().__init__(pinned=True)

    def allocate(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(count, dtype=dtype, device="cpu")
