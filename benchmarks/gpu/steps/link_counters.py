"""Compares the sources of a card's link traffic with copies of known size. Needs a GPU;
the comparison does not."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import torch

from ebbtide.features.calibrate.link import COPY_BYTES, DIRECTIONS, LinkProbe
from ebbtide.profiler.sampler.gpu import Gpu, open_gpus, same_gpu
from ebbtide.profiler.sampler.links import (
    CounterSource,
    GpmSource,
    LinkSample,
    LinkSource,
    ThroughputSource,
)
from ebbtide.profiler.sampler.nvml import Nvml, NvmlError

_PAUSE_S = 0.3
# Sources lag by about 70 ms: an earlier sample may still cover the time before the
# copies.
_SETTLE_NS = 250_000_000
# A sample below this share of the actual rate is a dropout.
_DROPOUT_SHARE = 0.5


@dataclass(frozen=True)
class ReferenceCopies:
    """Copies of an exact number of bytes, to check counters against. Times are of the
    monotonic clock."""

    start_ns: int
    end_ns: int
    nbytes: int

    @property
    def bytes_per_s(self) -> float:
        return self.nbytes / (self.end_ns - self.start_ns) * 1e9


def reference_copies(
    link: LinkProbe, direction: str, seconds: float
) -> ReferenceCopies:
    """Copy in one direction for about `seconds`, after a pause, so that counters can
    show the beginning."""
    count = link.count_for([direction], seconds)
    time.sleep(_PAUSE_S)
    begin = time.monotonic_ns()
    link.copy([direction], count)
    return ReferenceCopies(begin, time.monotonic_ns(), count * COPY_BYTES)


def check_counters(device: int, seconds: float) -> dict[str, Any]:
    """Return the result of `check_sources` for a CUDA device. Raises NvmlError where
    nothing counts its copies."""
    with contextlib.closing(Nvml()) as nvml:
        gpu = _find_gpu(nvml, device)
        obstacle = gpu.link_obstacle()
        if obstacle is not None:
            raise NvmlError(obstacle)
        link = LinkProbe(device)
        return check_sources(
            gpu,
            lambda direction, time_s: reference_copies(link, direction, time_s),
            seconds,
        )


def _find_gpu(nvml: Nvml, device: int) -> Gpu:
    """Return the GPU of a CUDA device: by its UUID, or a MIG device by that of its
    card, which CUDA may give it."""
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    for read in (Gpu.read_uuid, Gpu.read_card_uuid):
        for gpu in open_gpus(nvml).gpus:
            if same_gpu(read(gpu), uuid):
                return gpu
    raise NvmlError(f"NVML does not show {uuid}")


def check_sources(
    gpu: Gpu, copy: Callable[[str, float], ReferenceCopies], seconds: float
) -> dict[str, Any]:
    """Check each source of link traffic of a GPU: `compare_samples` by direction and
    name, or {"refused": reason}."""
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
                directions[direction] = compare_samples(
                    poller.samples(direction), copies
                )
        results[source.name] = (
            {"refused": poller.refused} if poller.refused is not None else directions
        )
    return results


class RateSample(NamedTuple):
    """The rate of one direction over a window that ends at `end_ns`."""

    end_ns: int
    window_ns: int
    bytes_per_s: float


def compare_samples(
    samples: Sequence[RateSample], copies: ReferenceCopies
) -> dict[str, float | int | None]:
    """Compare samples of a counter with copies of an exact number of bytes.

    Returns:
        scale: Median rate of the samples during the copies, divided by the actual rate.
        lag_ms: Time from the start of the copies to the middle of the first window with
            half of the median rate; its resolution is that of the samples.
        dropouts: Share of the samples below half of the actual rate.
        samples: Number of samples during the copies; if it is 0, all others are
            None."""
    rates = [
        sample.bytes_per_s
        for sample in samples
        if copies.start_ns + _SETTLE_NS <= sample.end_ns <= copies.end_ns
    ]
    if not rates:
        return {"scale": None, "lag_ms": None, "dropouts": None, "samples": 0}
    middle = median(rates)
    responses = (
        sample.end_ns - sample.window_ns / 2
        for sample in samples
        if sample.end_ns > copies.start_ns
        and sample.bytes_per_s > 0
        and sample.bytes_per_s >= _DROPOUT_SHARE * middle
    )
    first = next(responses, None)
    return {
        "scale": middle / copies.bytes_per_s,
        "lag_ms": None if first is None else max(0.0, first - copies.start_ns) / 1e6,
        "dropouts": sum(rate < _DROPOUT_SHARE * copies.bytes_per_s for rate in rates)
        / len(rates),
        "samples": len(rates),
    }


class Poller:
    """A thread that reads a source at its own interval, from the start to the end of a
    `with` block."""

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
                sample.t_ns,
                sample.window_ns,
                sample.h2d_bytes_per_s
                if direction == "h2d"
                else sample.d2h_bytes_per_s,
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
