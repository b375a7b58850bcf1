"""Triton's own driver of CUDA over `launcher.c` alone, for a torch of the CPU. Memory
of the device is the host's."""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.cuda_runtime.triton_launches import DriverLaunch, listen


class HostDriver:
    """The driver in this process, of a GPU with compute capability 9.0.

    Args:
        library: The compiled library.

    Attributes:
        driver: Triton's own driver of CUDA, over it.
        on_launch: Called with each launch.
    """

    def __init__(self, library: Path) -> None:
        from triton.backends.nvidia.driver import CudaDriver

        # Triton's launcher opens the library by its name, and gets the one that is
        # loaded.
        loaded = ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
        self.on_launch: Callable[[DriverLaunch], object] | None = None
        self._callback = listen(loaded, self._launched)
        self.driver: Any = CudaDriver()
        self.driver.get_current_device = lambda: 0
        self.driver.set_current_device = lambda device: None
        self.driver.get_current_stream = lambda device: 0
        self.driver.get_device_capability = lambda device: (9, 0)

    def _launched(self, launch: DriverLaunch) -> int:
        assert self.on_launch is not None
        self.on_launch(launch)
        return 0
