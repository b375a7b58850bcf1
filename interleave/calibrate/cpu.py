"""What the CPU does of an update, and how it and copies slow each other down."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ebbtide.interleave.calibrate.adamw import KEPT_BYTES, cpu_kernels
from ebbtide.interleave.calibrate.record import Record, Setup
from ebbtide.interleave.calibrate.timing import timed
from ebbtide.interleave.engine.numerics.kernels import ONE_PASS_BYTES

_COPY_BYTES = 64 << 20
# Of host memory, for each byte that a copy within it moves.
_READ_AND_WRITTEN = 2


def update(setup: Setup, record: Record) -> None:
    """cpu_update_params_per_s: the fastest kernel, its state in memory and not in caches."""
    params = setup.working_set // KEPT_BYTES
    how = f"threads: {setup.threads}, {params / 1e6:.1f} M parameters"
    rates = {}
    for name, make in cpu_kernels(params, setup.threads).items():
        timing = timed(make(), setup.window_s, setup.ranks)
        rates[name] = params / timing.seconds
        if rates[name] == max(rates.values()):
            record.rate("cpu_update_params_per_s", rates[name], f"{name} ({how})", timing)
            record.more["cpu_update"] = {
                "kernel": name,
                "threads": setup.threads,
                "params": params,
                "params_per_s": rates,
            }
            record.host_traffic(ONE_PASS_BYTES * rates[name], f"update, counted as one pass: {name} ({how})", timing)


def cast(setup: Setup, record: Record) -> None:
    """cpu_cast_params_per_s: fp32 to bf16."""
    torch.set_num_threads(setup.threads)
    master = torch.ones(setup.working_set // 6)
    half = torch.empty_like(master, dtype=torch.bfloat16)
    timing = timed(lambda: half.copy_(master), setup.window_s, setup.ranks)
    params = len(master)
    record.rate(
        "cpu_cast_params_per_s", params / timing.seconds, f"torch copy_ to bfloat16 (threads: {setup.threads})", timing
    )


def contention(setup: Setup, record: Record) -> None:
    """How the update slows while a thread copies in host memory. That thread has a core for itself, so that what is
    shared is memory."""
    threads = min(setup.threads, setup.cores - 1)
    if threads < 1:
        record.notes.append("one core cannot update and copy at once: how they slow each other is not known")
        return
    source, target = np.ones(_COPY_BYTES, np.uint8), np.ones(_COPY_BYTES, np.uint8)

    def copy() -> int:
        np.copyto(target, source)
        return _COPY_BYTES

    beside(setup, record, copy, "a thread's copies in host memory", threads, _READ_AND_WRITTEN)


def beside(setup: Setup, record: Record, copy: Callable[[], int], what: str, threads: int, traffic: float) -> None:
    """more.contention: rates of update and copies alone and together. copy: makes some copies and returns their bytes
    when they have ended. traffic: bytes of host memory read and written for each byte copied."""
    params = setup.working_set // KEPT_BYTES
    kernel = record.more["cpu_update"]["kernel"]
    step = cpu_kernels(params, threads)[kernel]()
    update_alone = params / timed(step, setup.window_s, setup.ranks).seconds
    with Copier(copy) as copier:
        setup.ranks.wait()
        copies_alone = copier.rate_over(lambda: time.sleep(setup.window_s))
        found: list[float] = []
        copies_beside = copier.rate_over(lambda: found.append(timed(step, setup.window_s, setup.ranks).seconds))
    update_beside = params / found[0]
    record.host_traffic(
        ONE_PASS_BYTES * update_beside + traffic * copies_beside, f"update (threads: {threads}) beside {what}"
    )
    record.more["contention"] = {
        "copies": what,
        "update_threads": threads,
        "update_params_per_s": {"alone": update_alone, "beside": update_beside},
        "copy_bytes_per_s": {"alone": copies_alone, "beside": copies_beside},
        "update_share": update_beside / update_alone,
        "copy_share": copies_beside / copies_alone,
        "asked_host_bytes_per_s": ONE_PASS_BYTES * update_alone + traffic * copies_alone,
    }


class Copier:
    """A thread that copies until it is told to stop."""

    def __init__(self, copy: Callable[[], int]) -> None:
        self._copy = copy
        self._moved = 0
        self._going = True
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Copier:
        self._thread.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._going = False
        self._thread.join()

    def rate_over(self, doing: Callable[[], object]) -> float:
        """Bytes copied a second while something is done, and until one copy has ended. Raises what a copy raises."""
        begin, before = time.perf_counter(), self._moved
        doing()
        while self._moved == before and self._error is None:
            time.sleep(1e-3)
        if self._error is not None:
            raise self._error
        return (self._moved - before) / (time.perf_counter() - begin)

    def _run(self) -> None:
        try:
            self._copy()
            while self._going:
                self._moved += self._copy()
        except Exception as error:
            self._error = error
