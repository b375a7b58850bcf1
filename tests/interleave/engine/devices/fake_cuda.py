"""A fake of the functions of torch.cuda that CudaDevice calls, on host memory, with a scripted allocator.

It runs CudaDevice's own code; it says nothing about CUDA."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from ebbtide.interleave.engine.devices.cuda import CudaDevice
from ebbtide.interleave.engine.numerics.kernels import CpuKernel

KERNEL = "ebbtide.interleave.engine.numerics.triton_kernel"


@dataclass
class FakeCuda:
    """The state of the fake.

    Attributes:
        total_bytes: Memory of the device.
        others_bytes: Memory of other processes and the CUDA context.
        reserved_bytes: Memory that torch has reserved.
        frees: How often torch has returned memory to the device.
        capturing: Whether the current stream is captured.
        register_error: The result of cudaHostRegister.
        registered: Addresses of pinned memory.
        compile_error: The error that every launch of the update raises.
        relaxed_threads: Number of threads that tolerate captures.
    """

    total_bytes: int = 80 << 30
    others_bytes: int = 1 << 30
    reserved_bytes: int = 0
    frees: int = 0
    capturing: bool = False
    register_error: int = 0
    registered: set[int] = field(default_factory=set)
    compile_error: Exception | None = None
    relaxed_threads: int = 0

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return self.total_bytes - self.others_bytes - self.reserved_bytes, self.total_bytes

    def memory_stats(self, device: torch.device) -> dict[str, int]:
        return {"reserved_bytes.all.current": self.reserved_bytes, "num_device_free": self.frees}

    def cudaHostRegister(self, pointer: int, nbytes: int, flags: int) -> int:
        if not self.register_error:
            self.registered.add(pointer)
        return self.register_error

    def cudaHostUnregister(self, pointer: int) -> int:
        self.registered.remove(pointer)
        return 0

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        assert ctypes.cast(mode, ctypes.POINTER(ctypes.c_int))[0] == 2
        self.relaxed_threads += 1
        return 0


class _Event:
    def __init__(self, blocking: bool = False) -> None:
        pass

    def record(self, stream: object) -> None:
        pass

    def synchronize(self) -> None:
        pass


def install(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Replace the functions of torch.cuda, and the kernels, which then run on the CPU."""
    fake, kernel = FakeCuda(), CpuKernel(1)

    def update(*arguments: Any) -> None:
        if fake.compile_error is not None:
            raise fake.compile_error
        kernel.update(*arguments)

    def deferred(call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda argument: (lambda result: lambda: result)(call(argument))

    def fingerprints(values: Sequence[torch.Tensor]) -> list[int]:
        return [kernel.fingerprint(value) for value in values]

    kernels = types.ModuleType(KERNEL)
    kernels.gpu_update = update  # type: ignore[attr-defined]
    kernels.gpu_sum_of_squares = deferred(kernel.sum_of_squares)  # type: ignore[attr-defined]
    kernels.gpu_fingerprint = deferred(fingerprints)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, KERNEL, kernels)
    monkeypatch.setattr("ebbtide.interleave.engine.numerics.triton_kernel", kernels, raising=False)
    stream = types.SimpleNamespace(synchronize=lambda: None)
    for name, replacement in {
        "current_device": lambda: 0,
        "device": lambda device: contextlib.nullcontext(),
        "stream": lambda stream: contextlib.nullcontext(),
        "Stream": lambda: stream,
        "current_stream": lambda device: stream,
        "Event": _Event,
        "mem_get_info": fake.mem_get_info,
        "memory_stats": fake.memory_stats,
        "memory_reserved": lambda device: fake.reserved_bytes,
        "is_current_stream_capturing": lambda: fake.capturing,
        "cudart": lambda: fake,
    }.items():
        monkeypatch.setattr(torch.cuda, name, replacement)
    monkeypatch.setattr("ebbtide.interleave.engine.devices.capture_mode._driver", lambda: fake)
    monkeypatch.setattr(CudaDevice, "close", lambda device: kernel.close())
    return fake


def open_fake(device: torch.device | None = None) -> CudaDevice:
    """Return a CudaDevice whose memory is host memory."""
    opened = CudaDevice(device or torch.device("cuda"))
    opened._device = torch.device("cpu")
    return opened
