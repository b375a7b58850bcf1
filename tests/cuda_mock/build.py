"""Compiles the mock of libcuda.so.1, and makes Triton launch on it in this process."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch

SOURCE = Path(__file__).with_name("cuda_mock.c")
LIBRARY = "libcuda.so.1"
_Callback = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_uint, ctypes.c_uint, ctypes.POINTER(ctypes.c_void_p))


def skip_without_requirements() -> None:
    """Skip the test where Triton cannot launch on the mock."""
    pytest.importorskip("triton", reason="needs triton, which is for Linux only")
    if shutil.which("gcc") is None:
        pytest.skip("the mock of libcuda.so.1 needs gcc")
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        pytest.skip("Triton's launcher needs Python.h")
    if torch.version.cuda is not None:
        pytest.skip("this build of torch loads the driver's own libcuda.so.1")


def compile_library(folder: Path) -> Path:
    """Compile the library into a folder."""
    import triton

    include = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    flags = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O1", "-fPIC", "-shared", f"-Wl,-soname,{LIBRARY}"]
    subprocess.run(["gcc", *flags, "-isystem", str(include), str(SOURCE), "-o", str(folder / LIBRARY)], check=True)
    return folder / LIBRARY


class MockDriver:
    """The mock in this process, as a Triton driver of a GPU with compute capability 9.0.

    Args:
        library: The compiled library.

    Attributes:
        driver: Triton's own driver of CUDA, over the mock.
        on_launch: Called with the name of the kernel, its number of programs and of threads for each, and the pointers
            to its arguments.
    """

    def __init__(self, library: Path) -> None:
        from triton.backends.nvidia.driver import CudaDriver

        # Triton's launcher opens the library by its name, and gets the one that is loaded.
        loaded = ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
        self.on_launch: Any = None
        self._callback = _Callback(self._launched)
        loaded.cuda_mock_set_callback(self._callback)
        self.driver: Any = CudaDriver()
        self.driver.get_current_device = lambda: 0
        self.driver.set_current_device = lambda device: None
        self.driver.get_current_stream = lambda device: 0
        self.driver.get_device_capability = lambda device: (9, 0)

    def _launched(self, name: bytes, programs: int, threads: int, arguments: Any) -> None:
        self.on_launch(name.decode(), programs, threads, arguments)
