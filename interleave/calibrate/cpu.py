"""Measures updates, in place and out of place, casts and norms on the CPU, and the contention of updates and copies."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ebbtide.interleave.calibrate.adamw import CAST_BYTES, KERNEL_BYTES, OnePassAdamW, cpu_kernels
from ebbtide.interleave.calibrate.record import Record, Setup
from ebbtide.interleave.calibrate.timing import Timing, measure_time, measure_times
from ebbtide.interleave.engine.numerics.kernels import ONE_PASS_BYTES, CpuKernel
from ebbtide.state_bytes import GRAD_BYTES

_COPY_BYTES = 64 << 20


def measure_update(setup: Setup, record: Record) -> None:
    """Measure `cpu_update_params_per_s`: the fastest kernel, with its state in memory and not in caches."""
    params = setup.working_set // KERNEL_BYTES
    size = f"threads: {setup.threads}, {params / 1e6:.1f} M parameters"
    rates = {}
    for name, make in cpu_kernels(params, setup.threads).items():
        timing = measure_time(make(), setup.window_s, setup.ranks)
        rates[name] = params / timing.seconds
        if rates[name] == max(rates.values()):
            record.rate("cpu_update_params_per_s", rates[name], f"{name} ({size})", timing)
            record.extra["cpu_update"] = {
                "kernel": name,
                "threads": setup.threads,
                "params": params,
                "params_per_s": rates,
            }
            record.host_traffic(ONE_PASS_BYTES * rates[name], f"update, counted as one pass: {name} ({size})", timing)


def measure_out_of_place(setup: Setup, record: Record) -> None:
    """Measure `cpu_out_of_place_share`: the engine's own kernel beside the old state and in place, in turns."""
    names = ("in_place", "out_of_place")
    ratio, size, timing = _measure_variant(setup, record, "cpu_out_of_place", names, OnePassAdamW.update_beside)
    details = f"the engine's update out of place and in place ({size})"
    record.rate("cpu_out_of_place_share", min(1.0, ratio), details, timing)


def measure_remainder(setup: Setup, record: Record) -> None:
    """Measure `cpu_remainder_ratio`: the engine's own kernel with masters as remainders and in fp32, in turns."""
    names = ("fp32", "remainder")
    ratio, size, timing = _measure_variant(setup, record, "cpu_remainder", names, OnePassAdamW.update_remainders)
    record.rate("cpu_remainder_ratio", ratio, f"the engine's update of remainders and of fp32 masters ({size})", timing)


def _measure_variant(
    setup: Setup, record: Record, key: str, names: tuple[str, str], variant: Callable[[OnePassAdamW], None]
) -> tuple[float, str, Timing]:
    """Measure the engine's kernel and a variant of it, in turns; record both rates under `key` and their names.

    Returns:
        (rate of the variant / rate of the kernel, threads and parameters in words, times of the variant).
    """
    params = setup.working_set // KERNEL_BYTES
    update = OnePassAdamW(params, setup.threads)
    usual, varied = measure_times([update, lambda: variant(update)], 2 * setup.window_s, setup.ranks)
    rates = [params / usual.seconds, params / varied.seconds]
    record.extra[key] = {
        "threads": setup.threads,
        "params": params,
        "params_per_s": dict(zip(names, rates, strict=True)),
    }
    return rates[1] / rates[0], f"threads: {setup.threads}, {params / 1e6:.1f} M parameters", varied


def measure_cast(setup: Setup, record: Record) -> None:
    """Measure `cpu_cast_params_per_s`: fp32 to bf16."""
    torch.set_num_threads(setup.threads)
    master = torch.ones(setup.working_set // CAST_BYTES)
    half = torch.empty_like(master, dtype=torch.bfloat16)
    timing = measure_time(lambda: half.copy_(master), setup.window_s, setup.ranks)
    record.rate(
        "cpu_cast_params_per_s",
        len(master) / timing.seconds,
        f"torch copy_ to bfloat16 (threads: {setup.threads})",
        timing,
    )


def measure_norm(setup: Setup, record: Record) -> None:
    """Measure `cpu_norm_params_per_s`: the engine's own sum of squares of bf16 gradients."""
    gradient = torch.full((setup.working_set // GRAD_BYTES,), 1e-3, dtype=torch.bfloat16)
    with contextlib.closing(CpuKernel(setup.threads)) as kernel:
        timing = measure_time(lambda: kernel.sum_of_squares(gradient), setup.window_s, setup.ranks)
    how = f"the engine's sum of squares of bfloat16 gradients (threads: {setup.threads})"
    record.rate("cpu_norm_params_per_s", len(gradient) / timing.seconds, how, timing)


def measure_contention(setup: Setup, record: Record) -> None:
    """Measure contention of the update and copies by another thread within host memory.

    The copying thread has a core of its own, so that memory is the only shared resource.
    """
    threads = min(setup.threads, setup.cores - 1)
    if threads < 1:
        record.notes.append("contention of updates and copies is not known: measuring it takes two cores")
        return
    source, target = np.ones(_COPY_BYTES, np.uint8), np.ones(_COPY_BYTES, np.uint8)

    def copy() -> int:
        np.copyto(target, source)
        return _COPY_BYTES

    # A copy within host memory reads and writes each byte.
    copies = ContendingCopies("copies by a thread within host memory", copy, host_bytes_per_byte=2.0)
    record_contention(setup, record, copies, threads)


@dataclass(frozen=True)
class ContendingCopies:
    """Copies to measure together with updates: their name in the machine file, what makes some and returns their bytes,
    and bytes of host memory read and written per byte copied."""

    description: str
    copy: Callable[[], int]
    host_bytes_per_byte: float


def record_contention(setup: Setup, record: Record, copies: ContendingCopies, threads: int) -> None:
    """Measure the rates of updates and copies, alone and together, and record them as `contention`."""
    params = setup.working_set // KERNEL_BYTES
    kernel = record.extra["cpu_update"]["kernel"]
    update = cpu_kernels(params, threads)[kernel]()
    update_alone = params / measure_time(update, setup.window_s, setup.ranks).seconds
    with Copier(copies.copy) as copier:
        setup.ranks.wait()
        copies_alone = copier.rate_during(lambda: time.sleep(setup.window_s))
        update_s: list[float] = []
        copies_together = copier.rate_during(
            lambda: update_s.append(measure_time(update, setup.window_s, setup.ranks).seconds)
        )
    update_together = params / update_s[0]
    record.host_traffic(
        ONE_PASS_BYTES * update_together + copies.host_bytes_per_byte * copies_together,
        f"update (threads: {threads}) during {copies.description}",
    )
    record.extra["contention"] = {
        "copies": copies.description,
        "update_threads": threads,
        "update_params_per_s": {"alone": update_alone, "beside": update_together},
        "copy_bytes_per_s": {"alone": copies_alone, "beside": copies_together},
        "update_share": update_together / update_alone,
        "copy_share": copies_together / copies_alone,
        "asked_host_bytes_per_s": ONE_PASS_BYTES * update_alone + copies.host_bytes_per_byte * copies_alone,
    }


class Copier:
    """A thread that copies from the start to the end of a `with` block, by calls that return the bytes copied."""

    def __init__(self, copy: Callable[[], int]) -> None:
        self._copy = copy
        self._copied_bytes = 0
        self._running = True
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Copier:
        self._thread.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._running = False
        self._thread.join()

    def rate_during(self, action: Callable[[], object]) -> float:
        """Return the bytes copied per second during an action, and until at least one copy has ended.

        Raises:
            Exception: The error of a failed copy.
        """
        begin, before = time.perf_counter(), self._copied_bytes
        action()
        while self._copied_bytes == before and self._error is None:
            time.sleep(1e-3)
        if self._error is not None:
            raise self._error
        return (self._copied_bytes - before) / (time.perf_counter() - begin)

    def _run(self) -> None:
        try:
            self._copy()
            while self._running:
                self._copied_bytes += self._copy()
        except Exception as error:
            self._error = error
