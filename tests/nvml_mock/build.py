"""Compiles the mock of libnvidia-ml.so.1, and loads it into this process in the place
of the driver's library."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

SOURCE = Path(__file__).with_name("nvml_mock.c")
LIBRARY = "libnvidia-ml.so.1"
# Functions that a driver of branch 470 does not have.
NEWER_THAN_470 = (
    "nvmlGpmQueryDeviceSupport",
    "nvmlGpmSampleAlloc",
    "nvmlGpmSampleFree",
    "nvmlGpmSampleGet",
    "nvmlGpmMetricsGet",
    "nvmlDeviceGetCurrentClocksEventReasons",
)


def compile_library(folder: Path, without: Collection[str] = ()) -> Path:
    """Compile the library into a folder, for LD_LIBRARY_PATH; skip the test where there
    is no gcc.

    Args:
        folder: The folder, which is created.
        without: Functions that the library does not have.
    """
    gcc = shutil.which("gcc")
    if gcc is None:
        pytest.skip("the mock of libnvidia-ml.so.1 needs gcc")
    folder.mkdir(parents=True)
    exported = folder / "exported.map"
    exported.write_text(
        "{ global: nvml*; local: "
        + "".join(f"{name}; " for name in without)
        + "*; };\n"
    )
    flags = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O1", "-fPIC", "-shared"]
    subprocess.run(
        [
            gcc,
            *flags,
            str(SOURCE),
            f"-Wl,--version-script={exported}",
            "-o",
            str(folder / LIBRARY),
        ],
        check=True,
    )
    return folder


class LoadedMock:
    """The mock in this process.

    Args:
        library: The library.
    """

    def __init__(self, library: Any) -> None:
        self._set_time_ns = library.nvml_mock_set_time_ns
        self._set_time_ns.argtypes = [ctypes.c_int64]
        self._set_time_ns.restype = None
        self.t_ns = 0

    def set_time_ns(self, t_ns: int) -> None:
        """Stop the clock of the mock at a time; 0: let it run."""
        self.t_ns = t_ns
        self._set_time_ns(t_ns)


@contextmanager
def loaded(folder: Path, description: Path) -> Iterator[LoadedMock]:
    """Make pynvml use the library of a folder in this process, until the end of the
    block."""
    import pynvml

    library = ctypes.CDLL(str(folder / LIBRARY))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NVML_MOCK", str(description))
        patch.setattr(pynvml, "nvmlLib", library)
        patch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
        mock = LoadedMock(library)
        try:
            yield mock
        finally:
            mock.set_time_ns(0)
            while library.nvmlShutdown() == pynvml.NVML_SUCCESS:
                pass
