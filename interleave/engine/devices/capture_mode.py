"""Lets threads of the engine work while the job captures a CUDA graph on another thread."""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger("ebbtide")

# cudaStreamCaptureModeRelaxed: https://docs.nvidia.com/cuda/cuda-driver-api (cuThreadExchangeStreamCaptureMode).
_RELAXED = 2


@contextmanager
def relaxed_captures() -> Iterator[None]:
    """Return a context in which the calling thread may allocate and wait while another thread captures a CUDA graph.

    By default CUDA forbids this to all threads of a process, and ends the capture with an error."""
    before = _exchange(_RELAXED)
    try:
        yield
    finally:
        # The job's own threads go on in the mode that they had.
        _exchange(before)


def _exchange(mode: int) -> int:
    """Set the capture mode of the calling thread, and return the one before."""
    value = ctypes.c_int(mode)
    error = _driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(value))
    if error:
        _warn(error)
    return value.value


@functools.cache
def _warn(error: int) -> None:
    log.warning("ebbtide: CUDA graphs may not be captured during training (CUDA error %d)", error)


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
