"""An emulated device whose memory can be read and written only while a copy or an
update uses it.

Run as a script, it checks random plans on the device, and that a stray access ends the
process."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from ebbtide.interleave.engine.devices.device import Direction
from ebbtide.interleave.engine.errors import DeviceMemoryError
from ebbtide.interleave.engine.numerics.reference import TensorUpdate
from ebbtide.interleave.engine.runtime.engine import Engine
from ebbtide.interleave.engine.runtime.store import Store
from tests.interleave.engine.plans import PLACEMENTS, make, workload_of
from tests.interleave.engine.twins import Jitter, JitteryDevice, JitteryKernel, Twin

_NONE, _READ_WRITE = 0, mmap.PROT_READ | mmap.PROT_WRITE
_libc = ctypes.CDLL(None, use_errno=True)


class GuardedDevice(JitteryDevice):
    """A device with random delays and its own pages for each allocation."""

    def __init__(self, jitter: Jitter) -> None:
        super().__init__(jitter)
        # Pages by address: their length, and how many streams use them now.
        self._pages: dict[int, list[int]] = {}
        self._kept: list[mmap.mmap] = []
        self._pages_lock = threading.Lock()

    def allocate_state(self, params: int, rows: int = 3) -> torch.Tensor:
        # For the capacity; its memory is not used.
        super().release(super().allocate_state(params, rows))
        nbytes = rows * params * torch.float32.itemsize
        pages = mmap.mmap(-1, nbytes)
        self._kept.append(pages)
        block = (
            torch.frombuffer(pages, dtype=torch.float32)[: rows * params]
            .view(rows, params)
            .fill_(float("nan"))
        )
        self._pages[block.data_ptr()] = [len(pages), 0]
        self._protect(block.data_ptr(), _NONE)
        self._used += nbytes
        return block

    def release(self, tensor: torch.Tensor) -> None:
        if self._pages[tensor.data_ptr()][1]:
            raise DeviceMemoryError("memory is released while a stream uses it")
        self._used -= tensor.nbytes

    def run_copies(
        self, direction: Direction, pairs: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        with self._open([tensor for pair in pairs for tensor in pair]):
            super().run_copies(direction, pairs)

    def run_updates(self, updates: Sequence[TensorUpdate]) -> None:
        with self._open(
            [tensor for own in updates for tensor in (own.grad, *own.state)]
        ):
            super().run_updates(updates)

    @contextmanager
    def _open(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        used = {
            base
            for tensor in tensors
            for base in self._pages
            if self._contains(base, tensor)
        }
        with self._pages_lock:
            for base in used:
                self._pages[base][1] += 1
                self._protect(base, _READ_WRITE)
        yield
        with self._pages_lock:
            for base in used:
                self._pages[base][1] -= 1
                if not self._pages[base][1]:
                    self._protect(base, _NONE)

    def _contains(self, base: int, tensor: torch.Tensor) -> bool:
        return base <= tensor.data_ptr() < base + self._pages[base][0]

    def _protect(self, base: int, protection: int) -> None:
        length = -(-self._pages[base][0] // mmap.PAGESIZE) * mmap.PAGESIZE
        if _libc.mprotect(ctypes.c_void_p(base), ctypes.c_size_t(length), protection):
            raise OSError(ctypes.get_errno(), "mprotect")


def run_plans(count: int, seed: int) -> None:
    """Run steps of random plans; the bits are those of the reference."""
    chance = random.Random(seed)
    for number in range(count):
        twin = Twin(
            [chance.randint(20, 300) for _ in range(3)],
            [torch.bfloat16] * 3,
            60,
            chance.randint(0, 1 << 30),
        )
        workload = workload_of(twin.sizes, True, number % 2 == 0)
        jitter = Jitter(number, 2e-4)
        device, kernel = GuardedDevice(jitter), JitteryKernel(jitter)
        engine = Engine(Store(twin.subgroups, device, kernel), len(twin.params))
        twin.begin(engine.store)
        for _ in range(2):
            placements = chance.choices(PLACEMENTS, k=len(twin.sizes))
            kept = chance.sample(range(len(twin.sizes)), k=len(twin.sizes) // 2)
            engine.set_plan(
                make(workload, placements, kept, chance.randint(0, 1 << 30)), workload
            )
            for _ in range(2):
                twin.step(engine, 0.75, 0.0 if number % 2 == 0 else 0.6)
                twin.check()
            engine.quiesce()
            twin.check(engine.store)
        engine.close()
        device.close()
        kernel.close()


def stray_access_ends_the_process() -> bool:
    """Read device memory on the host, in a forked process. Return whether that ended it
    by a segmentation fault."""
    block = GuardedDevice(Jitter(0)).allocate_state(100)
    child = os.fork()
    if not child:
        ctypes.c_float.from_address(block.data_ptr()).value  # noqa: B018
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSEGV


if __name__ == "__main__":
    assert stray_access_ends_the_process()
    run_plans(int(sys.argv[1]), int(sys.argv[2]))
