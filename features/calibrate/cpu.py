"""Measures rates of the CPU: the bandwidth of host memory, updates, casts and norms,
and the traffic of updates beside copies."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from ebbtide.features.calibrate.record import (
    MeasurementRecord,
    Setup,
    Timing,
    measure_time,
    measure_times,
)
from ebbtide.interleave.engine.numerics.host_arrays import row_stride
from ebbtide.interleave.engine.numerics.kernels import ONE_PASS_BYTES, CpuKernel
from ebbtide.interleave.engine.rules import find_rule
from ebbtide.interleave.engine.rules.adamw import Hyper
from ebbtide.state_bytes import GRAD_BYTES, PARAM_BYTES, STATE_BYTES

_FP32_GRAD_BYTES = 4
# Memory per parameter of the larger of the kernels below: state, gradient in both
# precisions, parameter.
KERNEL_BYTES = STATE_BYTES + GRAD_BYTES + _FP32_GRAD_BYTES + PARAM_BYTES
# Memory per parameter of a cast: fp32 and bf16.
CAST_BYTES = 6
_HYPER = Hyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01)

UpdateCall = Callable[[], object]


class TorchAdamW:
    """torch's fused AdamW with the casts that it needs. On a GPU a call only launches
    the kernels."""

    def __init__(self, params: int, device: torch.device, threads: int = 1) -> None:
        if device.type == "cpu":
            torch.set_num_threads(threads)
        self.gradient = torch.full((params,), 1e-3, dtype=torch.bfloat16, device=device)
        self.half = torch.ones_like(self.gradient)
        self.master = torch.ones(params, device=device)
        self.master.grad = torch.ones_like(self.master)
        self._optimizer = torch.optim.AdamW(
            [self.master],
            lr=_HYPER.lr,
            betas=(_HYPER.beta1, _HYPER.beta2),
            eps=_HYPER.eps,
            weight_decay=_HYPER.weight_decay,
            fused=True,
        )

    def __call__(self) -> None:
        assert self.master.grad is not None
        self.master.grad.copy_(self.gradient)
        self._optimizer.step()
        self.half.copy_(self.master)

    @property
    def state(self) -> list[torch.Tensor]:
        """The fp32 master and moments, valid after the first call, which creates the
        moments."""
        moments = self._optimizer.state[self.master]
        return [self.master.detach(), moments["exp_avg"], moments["exp_avg_sq"]]


class OnePassAdamW:
    """The engine's own CPU kernel."""

    def __init__(self, params: int, threads: int) -> None:
        self.gradient = torch.full((params,), 1e-3, dtype=torch.bfloat16)
        self.half = torch.ones_like(self.gradient)
        # Written, not only allocated: the first access to a page costs time.
        # The fp32 master and moments.
        self.state = torch.empty((3, row_stride(params)))[:, :params].fill_(0.0)
        self.state[0] = 1.0
        # What `update_beside` made of the state.
        self.new_state: torch.Tensor | None = None
        self._remainders: torch.Tensor | None = None
        self._kernel = CpuKernel(threads)
        self._steps = 0

    def __call__(self) -> None:
        self._steps += 1
        scalars = _HYPER.scalars(self._steps)
        self._kernel.update(self.gradient, tuple(self.state), self.half, scalars)

    def update_beside(self) -> None:
        """Write the state after the next step to other memory, which the first call
        allocates. The step stays the same."""
        if self.new_state is None:
            self.new_state = torch.empty((3, row_stride(len(self.half))))[
                :, : len(self.half)
            ].fill_(0.0)
        ranges = [(0, len(self.half), _HYPER.scalars(self._steps + 1))]
        self._kernel.update_beside(
            self.gradient, self.state, self.new_state, self.half, ranges
        )

    def update_remainders(self) -> None:
        """Make a step whose masters are remainders, in memory that the first call
        allocates: another step each time."""
        self._steps += 1
        if self._remainders is None:
            self._remainders = torch.zeros(len(self.half), dtype=torch.int16)
        state = (self._remainders, *self.state[1:])
        self._kernel.update(
            self.gradient,
            state,
            self.half,
            _HYPER.scalars(self._steps),
            rule=find_rule("adamw-remainder"),
        )


def cpu_kernels(params: int, threads: int) -> dict[str, Callable[[], UpdateCall]]:
    """Return a factory for each CPU kernel by its name in machine files."""
    return {
        "torch AdamW(fused=True) and its casts": lambda: TorchAdamW(
            params, torch.device("cpu"), threads
        ),
        "one pass by numba": lambda: OnePassAdamW(params, threads),
    }


_COPY_BYTES = 64 << 20
_MIN_WORKING_SET = 256 << 20
# More than four times the caches of most hosts; used if a host does not report its
# caches.
_DEFAULT_WORKING_SET = 1 << 30


def working_set(memory: int | None, cache: int | None) -> int:
    """Return the number of bytes to measure over: four times the last-level caches, so
    that they hold little of the memory, and at most an eighth of the `memory` of a
    rank; None: not known."""
    size = (
        max(_MIN_WORKING_SET, 4 * cache) if cache is not None else _DEFAULT_WORKING_SET
    )
    return min(size, memory // 8) if memory else size


def measure_bandwidth(setup: Setup, record: MeasurementRecord) -> None:
    """Measure `host_memory_bytes_per_s` with all threads of the rank: bytes read plus
    bytes written per second by the better one of two loops.

    Write-allocate traffic (a line read only because it is about to be written) does not
    count."""
    torch.set_num_threads(setup.threads)
    count = setup.working_set // 8
    target, source = torch.ones(count), torch.ones(count)
    size = 4 * count
    copy = measure_time(lambda: target.copy_(source), setup.window_s, setup.ranks)
    # In place, so that every line written has been read before, as in an update.
    add = measure_time(
        lambda: target.add_(source, alpha=0.5), setup.window_s, setup.ranks
    )
    threads = f"torch, threads: {setup.threads}, {size >> 20} MiB an array"
    record.host_traffic(2 * size / copy.seconds, f"copy ({threads})", copy)
    record.host_traffic(3 * size / add.seconds, f"in-place a += b / 2 ({threads})", add)


def measure_update(setup: Setup, record: MeasurementRecord) -> None:
    """Measure `cpu_update_params_per_s`: the fastest kernel.

    Its state is in memory and not in caches.
    """
    params = setup.working_set // KERNEL_BYTES
    size = f"threads: {setup.threads}, {params / 1e6:.1f} M parameters"
    rates = {}
    for name, make in cpu_kernels(params, setup.threads).items():
        timing = measure_time(make(), setup.window_s, setup.ranks)
        rates[name] = params / timing.seconds
        if rates[name] == max(rates.values()):
            record.rate(
                "cpu_update_params_per_s", rates[name], f"{name} ({size})", timing
            )
            by_kernel = {
                "kernel": name,
                "threads": setup.threads,
                "params": params,
                "params_per_s": rates,
            }
            record.extra["cpu_update"] = by_kernel
            record.host_traffic(
                ONE_PASS_BYTES * rates[name],
                f"update, counted as one pass: {name} ({size})",
                timing,
            )


def measure_out_of_place(setup: Setup, record: MeasurementRecord) -> None:
    """Measure `cpu_out_of_place_share` for the engine's own kernel beside the old state
    and in place, in turns."""
    names = ("in_place", "out_of_place")
    ratio, size, timing = _measure_variant(
        setup, record, "cpu_out_of_place", names, OnePassAdamW.update_beside
    )
    details = f"the engine's update out of place and in place ({size})"
    record.rate("cpu_out_of_place_share", min(1.0, ratio), details, timing)


def measure_remainder(setup: Setup, record: MeasurementRecord) -> None:
    """Measure `cpu_remainder_ratio` for the engine's own kernel with masters as
    remainders and in fp32, in turns."""
    names = ("fp32", "remainder")
    ratio, size, timing = _measure_variant(
        setup, record, "cpu_remainder", names, OnePassAdamW.update_remainders
    )
    record.rate(
        "cpu_remainder_ratio",
        ratio,
        f"the engine's update of remainders and of fp32 masters ({size})",
        timing,
    )


def _measure_variant(
    setup: Setup,
    record: MeasurementRecord,
    key: str,
    names: tuple[str, str],
    variant: Callable[[OnePassAdamW], None],
) -> tuple[float, str, Timing]:
    """Measure the engine's kernel and a variant, in turns.

    Record both rates under `key` and their names.

    Return (rate of the variant / rate of the kernel, threads and parameters in words,
    times of the variant)."""
    params = setup.working_set // KERNEL_BYTES
    update = OnePassAdamW(params, setup.threads)
    usual, varied = measure_times(
        [update, lambda: variant(update)], 2 * setup.window_s, setup.ranks
    )
    rates = [params / usual.seconds, params / varied.seconds]
    by_name = dict(zip(names, rates, strict=True))
    record.extra[key] = {
        "threads": setup.threads,
        "params": params,
        "params_per_s": by_name,
    }
    return (
        rates[1] / rates[0],
        f"threads: {setup.threads}, {params / 1e6:.1f} M parameters",
        varied,
    )


def measure_cast(setup: Setup, record: MeasurementRecord) -> None:
    """Measure `cpu_cast_params_per_s`: fp32 to bf16."""
    torch.set_num_threads(setup.threads)
    master = torch.ones(setup.working_set // CAST_BYTES)
    half = torch.empty_like(master, dtype=torch.bfloat16)
    timing = measure_time(lambda: half.copy_(master), setup.window_s, setup.ranks)
    how = f"torch copy_ to bfloat16 (threads: {setup.threads})"
    record.rate("cpu_cast_params_per_s", len(master) / timing.seconds, how, timing)


def measure_norm(setup: Setup, record: MeasurementRecord) -> None:
    """Measure `cpu_norm_params_per_s`, the engine's own sum of squares, for bf16
    gradients."""
    gradient = torch.full(
        (setup.working_set // GRAD_BYTES,), 1e-3, dtype=torch.bfloat16
    )
    with contextlib.closing(CpuKernel(setup.threads)) as kernel:
        timing = measure_time(
            lambda: kernel.sum_of_squares(gradient), setup.window_s, setup.ranks
        )
    how = (
        f"the engine's sum of squares of bfloat16 gradients (threads: {setup.threads})"
    )
    record.rate("cpu_norm_params_per_s", len(gradient) / timing.seconds, how, timing)


def measure_traffic(setup: Setup, record: MeasurementRecord) -> None:
    """Measure the traffic of host memory while the CPU updates and a thread copies.

    The thread copies within host memory, on a core of its own.
    """
    threads = min(setup.threads, setup.cores - 1)
    source, target = np.ones(_COPY_BYTES, np.uint8), np.ones(_COPY_BYTES, np.uint8)

    def copy() -> int:
        np.copyto(target, source)
        return 2 * _COPY_BYTES  # Each byte is read and written.

    if threads:
        record_traffic(
            setup, record, copy, "copies by a thread within host memory", threads
        )


def record_traffic(
    setup: Setup,
    record: MeasurementRecord,
    copy: Callable[[], int],
    copies: str,
    threads: int,
) -> None:
    """Record the traffic of host memory by updates beside `copy`.

    `copy` returns the bytes that it has read and written there; `copies` says in words
    what it copies.
    """
    params = setup.working_set // KERNEL_BYTES
    update = cpu_kernels(params, threads)[record.extra["cpu_update"]["kernel"]]()
    update_s: list[float] = []
    copied = copy_rate_during(
        copy,
        lambda: update_s.append(
            measure_time(update, setup.window_s, setup.ranks).seconds
        ),
    )
    how = f"update (threads: {threads}) during {copies}"
    record.host_traffic(ONE_PASS_BYTES * params / update_s[0] + copied, how)


def copy_rate_during(copy: Callable[[], int], action: Callable[[], object]) -> float:
    """Return the bytes that a thread copies per second during an action, by calls that
    return the bytes copied.

    The first copy is not measured; at least one is. Raises the error of a copy.
    """
    copy()
    stop = threading.Event()

    def run() -> int:
        copied = copy()
        while not stop.is_set():
            copied += copy()
        return copied

    with ThreadPoolExecutor(1) as pool:
        begin = time.perf_counter()
        copied = pool.submit(run)
        try:
            action()
        finally:
            stop.set()
        return copied.result() / (time.perf_counter() - begin)
