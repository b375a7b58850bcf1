"""Lets threads of the engine work while the job captures a CUDA graph on another thread."""

from __future__ import annotations

import ctypes
import logging
import threading

log = logging.getLogger("ebbtide")

# cudaStreamCaptureModeRelaxed: https://docs.nvidia.com/cuda/cuda-driver-api (cuThreadExchangeStreamCaptureMode).
_RELAXED = 2
_thread = threading.local()


def tolerate_captures() -> None:
    """Allow the calling thread, from now on, to allocate and wait while another thread captures a CUDA graph.

    By default CUDA forbids this to all threads of a process, and ends the capture with an error. A second call of the
    same thread does nothing."""
    if getattr(_thread, "is_relaxed", False):
        return
    _thread.is_relaxed = True
    mode = ctypes.c_int(_RELAXED)
    error = _driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    if error:
        log.warning("ebbtide: CUDA graphs may not be captured during training (CUDA error %d)", error)


def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
