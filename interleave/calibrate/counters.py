"""Checks the GPU's counters of link traffic against copies of an exact number of bytes."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch

from ebbtide.interleave.calibrate.link import DIRECTIONS, LinkProbe, ReferenceCopies
from ebbtide.interleave.calibrate.record import Record, Setup
from ebbtide.profiler.sampler.gpu import Gpu, open_gpus, same_gpu
from ebbtide.profiler.sampler.links import CounterSource, GpmSource, LinkSample, LinkSource, ThroughputSource
from ebbtide.profiler.sampler.nvml import Nvml, NvmlError

# Sources lag by about 70 ms: an earlier sample may still cover the time before the copies.
_SETTLE_NS = 250_000_000
_MIN_COPY_S = 1.0
_PAUSE_S = 0.3
# A sample below this share of the actual rate is a dropout.
_DROPOUT_SHARE = 0.5


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
    """Check each source of link traffic that a GPU has.

    Args:
        gpu: The GPU to check.
        copy: Copies in a direction for a number of seconds.
        seconds: Duration of the copies for each source and direction.

    Returns:
        By the name of each source: the result of `compare_samples` per direction, or {"refused": reason}.
    """
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
        samples: Number of samples during the copies; if it is 0, all others are None.
    """
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
    """A thread that reads a source at its own interval, from the start to the end of a `with` block.

    Attributes:
        refused: Why the source cannot be read; None if it can.
    """

    def __init__(self, source: LinkSource) -> None:
        self.refused: str | None = None
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
                sample.h2d_bytes_per_s if direction == "h2d" else sample.d2h_bytes_per_s,
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
