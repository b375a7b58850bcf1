"""The stand-in's own functions, by ctypes: launches of Python functions as kernels,
failures, races, counts."""

import ctypes
import gc
import itertools
import os
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch

_Kernel = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_SiteWriter = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int)


class _Access(ctypes.Structure):
    _fields_ = (
        ("begin", ctypes.c_size_t),
        ("bytes", ctypes.c_size_t),
        ("writes", ctypes.c_int),
    )


# Calls that may wait release Python's lock; a launch does not wait.
_library = ctypes.CDLL(None)
_library.cuda_runtime_alias.restype = ctypes.c_void_p
_library.cuda_runtime_alias.argtypes = (ctypes.c_void_p,)
_library.cuda_runtime_launch.argtypes = (
    *(
        ctypes.c_void_p,
        _Kernel,
        ctypes.c_void_p,
        ctypes.c_char_p,
        ctypes.POINTER(_Access),
        ctypes.c_int,
    ),
)
_library.cuda_runtime_fail.argtypes = (
    ctypes.c_char_p,
    ctypes.c_long,
    ctypes.c_int,
    ctypes.c_int,
)
for _name in ("races", "calls", "pageable_bytes"):
    getattr(_library, f"cuda_runtime_{_name}").restype = ctypes.c_long

# Names live as long as the library, which reports kernels by them.
_names: dict[str, ctypes.Array[ctypes.c_char]] = {}
_pending: dict[int, tuple[str, Callable[[], object]]] = {}
_in_graphs: set[int] = set()
_numbers = itertools.count(1)
# Names of kernels that have raised on their stream.
errors: list[str] = []


class _WithoutCollection:
    """Lets no garbage be collected while kernels run: finalizers may wait for streams,
    and those on the thread of a stream would wait for themselves."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kernels = 0
        self._is_enabled = False

    def __enter__(self) -> None:
        with self._lock:
            self._is_enabled |= gc.isenabled()
            gc.disable()
            self._kernels += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._kernels -= 1
            if not self._kernels and self._is_enabled:
                self._is_enabled = False
                gc.enable()


_without_collection = _WithoutCollection()


@_Kernel
def _run(number: int) -> None:
    with _without_collection:
        _run_kernel(number)


def _run_kernel(number: int) -> None:
    name, work = _pending[number] if number in _in_graphs else _pending.pop(number)
    try:
        with torch.inference_mode(False), torch.no_grad():
            work()
    except BaseException:
        errors.append(name)
        sys.stderr.write(
            f"cuda_runtime: {name} failed on its stream\n{traceback.format_exc()}"
        )


def issue(
    stream: int,
    name: str,
    work: Callable[[], object],
    reads: Sequence["Bytes"],
    writes: Sequence["Bytes"],
) -> int:
    """Let a function run as a kernel on a stream, the current one; return a
    cudaError_t. See `launch`."""
    number = next(_numbers)
    _pending[number] = name, work
    if torch.cuda.is_current_stream_capturing():
        _in_graphs.add(number)
    touched = [*((one, 1) for one in writes), *((one, 0) for one in reads)]
    accesses = (_Access * len(touched))(
        *(_Access(one.begin, one.nbytes, mode) for one, mode in touched)
    )
    buffer = _names.setdefault(name, ctypes.create_string_buffer(name.encode()))
    error = int(
        _library.cuda_runtime_launch(
            stream, _run, number, buffer, accesses, len(touched)
        )
    )
    if error:
        _pending.pop(number, None)
    return error


def launch(
    name: str,
    work: Callable[[], object],
    reads: Sequence["Bytes"],
    writes: Sequence["Bytes"],
) -> None:
    """Let a function run as a kernel on the current stream.

    Args:
        name: The name of the kernel.
        work: Called on the stream's thread. It must not keep tensors of the device
            alive.
        reads: The bytes that it reads.
        writes: The bytes that it writes.

    Raises:
        torch.AcceleratorError: The launch has failed, as tests may ask for.
    """
    error = issue(torch.cuda.current_stream().cuda_stream, name, work, reads, writes)
    if error:
        raise torch.AcceleratorError(
            f"CUDA error: {error} of the stand-in, in a launch of {name}"
        )


class Bytes:
    """A range of addresses."""

    __slots__ = ("begin", "nbytes")

    def __init__(self, begin: int, nbytes: int) -> None:
        self.begin, self.nbytes = begin, nbytes


def alias(address: int) -> int:
    """Return the address at which the host can use memory of a device."""
    return int(_library.cuda_runtime_alias(address) or 0)


def fail(function: str, nth: int, error: int = 2, sticky: bool = False) -> None:
    """Let the n-th call from now on fail, of the entry points whose names contain a
    text; 0: no call fails.

    Args:
        function: The text, such as "cudaMalloc"; "" for all.
        nth: From 1.
        error: A cudaError_t; 2 is out of memory, 700 an illegal address.
        sticky: Whether all later calls fail, too.
    """
    _library.cuda_runtime_fail(function.encode(), nth, error, int(sticky))


def race_count() -> int:
    """Return how many pairs of operations touched the same bytes without an order
    (CUDA_RUNTIME_ORDER=1)."""
    return int(_library.cuda_runtime_races())


def call_count() -> int:
    """Return how many calls of entry points there were that can fail."""
    return int(_library.cuda_runtime_calls())


def pageable_bytes(direction: str) -> int:
    """Return the bytes of copies of pageable memory so far, `h2d` or `d2h`."""
    return int(_library.cuda_runtime_pageable_bytes({"h2d": 1, "d2h": 2}[direction]))


@_SiteWriter
def _write_site(text: int, nbytes: int) -> None:
    site = _site().encode()[: nbytes - 1] + b"\0"
    ctypes.memmove(text, site, len(site))


def _site() -> str:
    """Return the innermost lines of the caller outside of torch and of this package."""
    frame: Any = sys._current_frames().get(threading.get_ident())
    lines: list[str] = []
    while frame is not None and len(lines) < 2:
        path = frame.f_code.co_filename
        if (
            f"{os.sep}torch{os.sep}" not in path
            and f"{os.sep}cuda_runtime{os.sep}" not in path
        ):
            lines.append(f"{os.path.basename(path)}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(lines) or "a thread of autograd"


def install_order_sites() -> None:
    """Let reports of races name the lines that issued the operations."""
    if os.environ.get("CUDA_RUNTIME_ORDER", "0") != "0":
        _library.cuda_runtime_set_site_writer(_write_site)


def close() -> None:
    """Wait for all streams; no kernel runs after that. Called when Python ends."""
    _library.cuda_runtime_close()
    if errors:
        sys.stderr.write(
            f"cuda_runtime: {len(errors)} kernels failed: "
            f"{', '.join(sorted(set(errors)))}\n"
        )
