"""Launches by Triton's launcher as they arrive at the driver, with what is compiled
into their kernels."""

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.int64]
# By Triton's types; all others are addresses.
_INTEGERS = {"i32": ctypes.c_int32, "i64": ctypes.c_int64}


@dataclass(frozen=True)
class DriverLaunch:
    """A launch of one of ebbtide's kernels.

    Attributes:
        kernel: The name of the kernel.
        programs: The number of its programs.
        threads: The number of threads of each program.
        stream: The handle of its stream.
        arguments: What the driver got, by name: addresses and integers.
        constants: What is compiled into the kernel, by name.
    """

    kernel: str
    programs: int
    threads: int
    stream: int
    arguments: dict[str, int]
    constants: dict[str, Any]

    @property
    def columns(self) -> int:
        """The columns of a row of its table."""
        from ebbtide.interleave.engine.numerics.triton_compiled import BLOCK_COLUMNS

        if self.kernel != "update":
            return BLOCK_COLUMNS
        moments = self.constants["moments"]
        return (
            self.first_other_column
            + self.constants["rounds"]
            + self.constants["scaled"] * (1 + moments)
        )

    @property
    def first_other_column(self) -> int:
        """The first column of an update after length, addresses of gradient, parameter
        and state, and factors."""
        return 4 + self.constants["moments"] + (self.constants["factors"] + 1) // 2

    @property
    def table_bytes(self) -> int:
        return 8 * self.arguments["count"] * (1 + self.columns)

    def rows(self, words: Words) -> tuple[Words, Words]:
        """Return the first program of each tensor, and the rows, of the words of its
        table."""
        count = self.arguments["count"]
        return words[:count], words[count:].reshape(count, self.columns)


class _Launch(ctypes.Structure):
    """`struct launch` of launcher.c."""

    _fields_ = (
        *(
            ("kernel", ctypes.c_char_p),
            ("function", ctypes.c_void_p),
            ("stream", ctypes.c_void_p),
        ),
        *(("programs", ctypes.c_uint), ("threads", ctypes.c_uint)),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
    )


_Callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Launch))


def listen(driver: ctypes.CDLL, on_launch: Callable[[DriverLaunch], int]) -> Any:
    """Let a function get the launches of a driver; return what must live as long. It
    returns a CUresult."""
    callback = _Callback(lambda launch: on_launch(_read(launch.contents)))
    driver.cuda_runtime_set_on_launch(callback)
    return callback


def _read(launch: _Launch) -> DriverLaunch:
    name = launch.kernel.decode()
    source = _compiled(name, launch.function).src
    types = {
        name: kind for name, kind in source.signature.items() if kind != "constexpr"
    }
    arguments = {
        name: int(
            ctypes.cast(
                launch.arguments[index],
                ctypes.POINTER(_INTEGERS.get(kind, ctypes.c_uint64)),
            )[0]
        )
        for index, (name, kind) in enumerate(types.items())
    }
    constants = {
        source.fn.arg_names[path[0]]: value for path, value in source.constants.items()
    }
    return DriverLaunch(
        name, launch.programs, launch.threads, launch.stream or 0, arguments, constants
    )


@functools.cache
def _compiled(name: str, function: int) -> Any:
    """Return the compiled kernel with this handle."""
    from ebbtide.interleave.engine.numerics import triton_compiled

    for cache, *_ in list(getattr(triton_compiled, name).device_caches.values()):
        for kernel in list(cache.values()):
            if kernel.function == function:
                return kernel
    raise LookupError(f"{name} was not compiled by Triton")
