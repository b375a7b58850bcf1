"""Measures copies between host and GPU. Needs a GPU; the arithmetic on event times does not."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch

from ebbtide.interleave.calibrate.cpu import ContendingCopies, record_contention
from ebbtide.interleave.calibrate.record import Record, Setup, Timing, measure_time
from ebbtide.profiler.sampler.gpu import Gpu, open_gpus, same_gpu
from ebbtide.profiler.sampler.links import CounterSource, GpmSource, LinkSample, LinkSource, ThroughputSource
from ebbtide.profiler.sampler.nvml import Nvml, NvmlError

DIRECTIONS = ("h2d", "d2h")
# A power of two: torch rounds pinned memory up to one, so this is pinned exactly.
_COPY_BYTES = 256 << 20
_MIN_COPIES = 5
# Copies per call during updates: enough to keep the link busy, few enough to stop soon.
_BATCH_COPIES = 4
_PAUSE_S = 0.3

# Times of the copies of one direction in ms: of the start, then of the end of each copy.
CopyTimes = Sequence[float]
# Sources lag by about 70 ms: an earlier sample may still cover the time before the copies.
_SETTLE_NS = 250_000_000
_MIN_COPY_S = 1.0
# A sample below this share of the actual rate is a dropout.
_DROPOUT_SHARE = 0.5


@dataclass(frozen=True)
class ReferenceCopies:
    """Copies of an exact number of bytes, to check counters against. Times are of the monotonic clock."""

    start_ns: int
    end_ns: int
    nbytes: int

    @property
    def bytes_per_s(self) -> float:
        return self.nbytes / (self.end_ns - self.start_ns) * 1e9


class LinkProbe:
    """Pinned and device buffers, and a stream per direction, to copy over the link of one CUDA device."""

    def __init__(self, device: int) -> None:
        with torch.cuda.device(device):
            self._device = device
            self._streams = {direction: torch.cuda.Stream() for direction in DIRECTIONS}
            # (target, source) per direction.
            self._buffers = {}
            for direction in DIRECTIONS:
                pinned = torch.ones(_COPY_BYTES, dtype=torch.uint8).pin_memory()
                on_device = torch.ones(_COPY_BYTES, dtype=torch.uint8, device="cuda")
                self._buffers[direction] = (on_device, pinned) if direction == "h2d" else (pinned, on_device)
            torch.cuda.synchronize()

    def copy(self, directions: Sequence[str], count: int) -> list[CopyTimes]:
        """Make `count` copies in each direction, all directions at once; return their times when all have ended."""
        with torch.cuda.device(self._device):
            begin = torch.cuda.Event(enable_timing=True)
            begin.record()
            events: list[list[Any]] = [[] for _ in directions]
            for number in range(count + 1):
                for direction, direction_events in zip(directions, events, strict=True):
                    target, source = self._buffers[direction]
                    with torch.cuda.stream(self._streams[direction]):
                        if number:
                            target.copy_(source, non_blocking=True)
                        else:
                            self._streams[direction].wait_event(begin)
                        event = torch.cuda.Event(enable_timing=True, blocking=True)
                        event.record()
                    direction_events.append(event)
            # Blocking events put the waiting thread to sleep: spinning would take a core from a concurrent update.
            for direction_events in events:
                direction_events[-1].synchronize()
            return [[begin.elapsed_time(event) for event in direction_events] for direction_events in events]

    def count_for(self, directions: Sequence[str], seconds: float) -> int:
        """Return how many copies take about `seconds`."""
        copy_s = min(copy_durations(self.copy(directions, _MIN_COPIES)[0]))
        return max(_MIN_COPIES, round(seconds / copy_s))

    def reference_copies(self, direction: str, seconds: float) -> ReferenceCopies:
        """Copy in one direction for about `seconds`, after a pause, so that counters can show the beginning."""
        count = self.count_for([direction], seconds)
        time.sleep(_PAUSE_S)
        begin = time.monotonic_ns()
        self.copy([direction], count)
        return ReferenceCopies(begin, time.monotonic_ns(), count * _COPY_BYTES)


def copy_durations(times: CopyTimes) -> list[float]:
    """Return the duration of each copy in seconds."""
    return [(end - begin) / 1e3 for begin, end in itertools.pairwise(times)]


def combined_bytes_per_s(times: Sequence[CopyTimes], nbytes: int) -> float:
    """Return the throughput of all directions together while all were busy; each copy has a constant rate."""
    begin, end = max(direction[0] for direction in times), min(direction[-1] for direction in times)
    moved = sum(
        float(np.diff(np.interp([begin, end], direction, nbytes * np.arange(len(direction))))[0]) for direction in times
    )
    return moved / (end - begin) * 1e3


def measure_pinned_copies(setup: Setup, record: Record) -> None:
    """Measure `h2d_bytes_per_s`, `d2h_bytes_per_s` and `duplex_bytes_per_s`: pinned memory, by CUDA events."""
    assert setup.device is not None
    link = LinkProbe(setup.device)
    how = f"pinned copies of {_COPY_BYTES >> 20} MiB by CUDA events"
    for direction in DIRECTIONS:
        timing = Timing.from_runs(copy_durations(_copies(link, [direction], setup)[0]))
        record.rate(f"{direction}_bytes_per_s", _COPY_BYTES / timing.seconds, how, timing)
    times = _copies(link, DIRECTIONS, setup)
    how = f"{how}, sum of both directions at once"
    record.rate("duplex_bytes_per_s", combined_bytes_per_s(times, _COPY_BYTES), how)


def _copies(link: LinkProbe, directions: Sequence[str], setup: Setup) -> list[CopyTimes]:
    count = link.count_for(directions, setup.window_s)
    setup.ranks.wait()
    return link.copy(directions, count)


def measure_pageable_copies(setup: Setup, record: Record) -> None:
    """Measure `h2d_pageable_bytes_per_s` and `d2h_pageable_bytes_per_s` by the host clock: they block the host."""
    # Written before, and not pinned.
    host = torch.ones(_COPY_BYTES, dtype=torch.uint8)
    on_device = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=f"cuda:{setup.device}")
    for direction, target, source in (("h2d", on_device, host), ("d2h", host, on_device)):

        def copy(target: torch.Tensor = target, source: torch.Tensor = source) -> None:
            target.copy_(source)
            torch.cuda.synchronize(setup.device)

        timing = measure_time(copy, setup.window_s, setup.ranks)
        how = f"pageable copies of {_COPY_BYTES >> 20} MiB by the host clock"
        record.rate(f"{direction}_pageable_bytes_per_s", _COPY_BYTES / timing.seconds, how, timing)


def measure_contention(setup: Setup, record: Record) -> None:
    """Measure contention of the update on the CPU and pinned copies in both directions."""
    assert setup.device is not None
    link = LinkProbe(setup.device)

    def copy() -> int:
        link.copy(DIRECTIONS, _BATCH_COPIES)
        return 2 * _BATCH_COPIES * _COPY_BYTES

    copies = ContendingCopies("pinned copies in both directions", copy, host_bytes_per_byte=1.0)
    record_contention(setup, record, copies, setup.threads)


def check_counters(setup: Setup, record: Record) -> None:
    """Record the result of `check_sources` as `counters`."""
    assert setup.device is not None
    try:
        with contextlib.closing(Nvml()) as nvml:
            gpu = _find_gpu(nvml, setup.device)
            obstacle = gpu.link_obstacle()
            if obstacle is not None:
                raise NvmlError(obstacle)
            copy = LinkProbe(setup.device).reference_copies
            record.extra["counters"] = check_sources(gpu, copy, max(_MIN_COPY_S, setup.window_s))
    except NvmlError as error:
        record.notes.append(f"the link counters of the GPU were not checked: {error}")


def _find_gpu(nvml: Nvml, device: int) -> Gpu:
    """Return the GPU of a CUDA device: by its UUID, or a MIG device by that of its card, which CUDA may give it."""
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    for read in (Gpu.read_uuid, Gpu.read_card_uuid):
        for gpu in open_gpus(nvml).gpus:
            if same_gpu(read(gpu), uuid):
                return gpu
    raise NvmlError(f"NVML does not show {uuid}")


def check_sources(gpu: Gpu, copy: Callable[[str, float], ReferenceCopies], seconds: float) -> dict[str, Any]:
    """Check each source of link traffic of a GPU: `compare_samples` by direction and name, or {"refused": reason}."""
    results: dict[str, Any] = {}
    for source in (CounterSource(gpu), GpmSource(gpu), ThroughputSource(gpu)):
        if isinstance(source, GpmSource) and not gpu.supports_gpm():
            results[source.name] = {"refused": "not on this card"}
            continue
        directions = {}
        with Poller(source) as poller:
            for direction in DIRECTIONS:
                time.sleep(_PAUSE_S)
                if poller.refused is not None:
                    break
                copies = copy(direction, seconds)
                time.sleep(_PAUSE_S)
                directions[direction] = compare_samples(poller.samples(direction), copies)
        results[source.name] = {"refused": poller.refused} if poller.refused is not None else directions
    return results


class RateSample(NamedTuple):
    """The rate of one direction over a window that ends at `end_ns`."""

    end_ns: int
    window_ns: int
    bytes_per_s: float


def compare_samples(samples: Sequence[RateSample], copies: ReferenceCopies) -> dict[str, float | int | None]:
    """Compare samples of a counter with copies of an exact number of bytes.

    Returns:
        scale: Median rate of the samples during the copies, divided by the actual rate.
        lag_ms: Time from the start of the copies to the middle of the first window with half of the median rate; its
            resolution is that of the samples.
        dropouts: Share of the samples below half of the actual rate.
        samples: Number of samples during the copies; if it is 0, all others are None."""
    rates = [sample.bytes_per_s for sample in samples if copies.start_ns + _SETTLE_NS <= sample.end_ns <= copies.end_ns]
    if not rates:
        return {"scale": None, "lag_ms": None, "dropouts": None, "samples": 0}
    middle = median(rates)
    responses = (
        sample.end_ns - sample.window_ns / 2
        for sample in samples
        if sample.end_ns > copies.start_ns and sample.bytes_per_s > 0 and sample.bytes_per_s >= _DROPOUT_SHARE * middle
    )
    first = next(responses, None)
    return {
        "scale": middle / copies.bytes_per_s,
        "lag_ms": None if first is None else max(0.0, first - copies.start_ns) / 1e6,
        "dropouts": sum(rate < _DROPOUT_SHARE * copies.bytes_per_s for rate in rates) / len(rates),
        "samples": len(rates),
    }


class Poller:
    """A thread that reads a source at its own interval, from the start to the end of a `with` block."""

    def __init__(self, source: LinkSource) -> None:
        self.refused: str | None = None  # Why the source cannot be read.
        self._source = source
        self._samples: list[LinkSample] = []
        self._running = True
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Poller:
        self._thread.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._running = False
        self._thread.join()

    def samples(self, direction: str) -> list[RateSample]:
        """Return the samples so far of one direction."""
        return [
            RateSample(
                sample.t_ns, sample.window_ns, sample.h2d_bytes_per_s if direction == "h2d" else sample.d2h_bytes_per_s
            )
            for sample in list(self._samples)
        ]

    def _run(self) -> None:
        while self._running:
            try:
                sample = self._source.read()
            except NvmlError as error:
                # A card that fails only sometimes is judged by its other samples.
                if not self._samples:
                    self.refused = str(error)
                    return
                sample = None
            if sample is not None:
                self._samples.append(sample)
            time.sleep(self._source.period_s)
