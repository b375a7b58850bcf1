"""The card's own counters of link use, held against copies whose bytes are known."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch

from ebbtide.interleave.calibrate.link import Known, Link
from ebbtide.interleave.calibrate.record import Record, Setup
from ebbtide.profiler.sampler.links import CounterSource, GpmSource, LinkSample, LinkSource, ThroughputSource
from ebbtide.profiler.sampler.nvml import Gpu, Nvml, NvmlError

# Sources lag by some 70 ms: a sample sooner after the copies began may be of before.
_SETTLE_NS = 250_000_000
_LEAST_S = 1.0
_PAUSE_S = 0.3
# A sample with less than this share of what passes has lost it.
_LOST = 0.5


def counters(setup: Setup, record: Record) -> None:
    """more.counters: see `check`."""
    assert setup.device is not None
    try:
        with contextlib.closing(Nvml()) as nvml:
            gpu = _gpu_of(nvml, setup.device)
            record.more["counters"] = check(gpu, Link(setup.device).known, max(_LEAST_S, setup.window_s))
    except NvmlError as error:
        record.notes.append(f"the card's counters are not checked: {error}")


def _gpu_of(nvml: Nvml, device: int) -> Gpu:
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    for gpu in nvml.gpus():
        if gpu.describe()["uuid"] == uuid:
            return gpu
    raise NvmlError(f"NVML does not show {uuid}")


def check(gpu: Gpu, copy: Callable[[str, float], Known], seconds: float) -> dict[str, Any]:
    """Of each source of the card's link use, by its name, a `judge` for each direction, or {"refused": why not}.

    copy: copies in a direction for some seconds.
    """
    found: dict[str, Any] = {}
    for source in (CounterSource(gpu), GpmSource(gpu), ThroughputSource(gpu)):
        if isinstance(source, GpmSource) and not gpu.gpm_supported():
            found[source.name] = {"refused": "not on this card"}
            continue
        judged = {}
        with Poller(source) as poller:
            for way in ("h2d", "d2h"):
                time.sleep(_PAUSE_S)
                if poller.refused is not None:
                    break
                known = copy(way, seconds)
                time.sleep(_PAUSE_S)
                judged[way] = judge(poller.lines(way), known)
        found[source.name] = {"refused": poller.refused} if poller.refused is not None else judged
    return found


# (end of the window ns, its length ns, bytes/s in it) of each sample.
Samples = Sequence[tuple[int, int, float]]


def judge(samples: Samples, known: Known) -> dict[str, float | int | None]:
    """Hold samples against copies. scale: their median rate while the copies ran, over the rate that is known.
    dropouts: the share of them below half of that rate. lag_ms: from the beginning of the copies to the middle of the
    first window that saw half of what the median one saw, no finer than samples are. None where no sample lies within
    the copies."""
    rates = [rate for end, _, rate in samples if known.start_ns + _SETTLE_NS <= end <= known.end_ns]
    if not rates:
        return {"scale": None, "lag_ms": None, "dropouts": None, "samples": 0}
    middle = median(rates)
    seen = (
        end - length / 2
        for end, length, rate in samples
        if end > known.start_ns and rate > 0 and rate >= _LOST * middle
    )
    first = next(seen, None)
    return {
        "scale": middle / known.bytes_per_s,
        "lag_ms": None if first is None else max(0.0, first - known.start_ns) / 1e6,
        "dropouts": sum(rate < _LOST * known.bytes_per_s for rate in rates) / len(rates),
        "samples": len(rates),
    }


class Poller:
    """A thread that reads a source at its own pace. refused: why it cannot be read."""

    def __init__(self, source: LinkSource) -> None:
        self.refused: str | None = None
        self._source = source
        self._samples: list[LinkSample] = []
        self._going = True
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Poller:
        self._thread.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._going = False
        self._thread.join()

    def lines(self, way: str) -> Samples:
        """What was read so far of one direction."""
        return [
            (sample.t_ns, sample.window_ns, sample.h2d_bytes_per_s if way == "h2d" else sample.d2h_bytes_per_s)
            for sample in list(self._samples)
        ]

    def _run(self) -> None:
        while self._going:
            try:
                sample = self._source.read()
            except NvmlError as error:
                # A card that answers now and then is judged by what it does answer.
                if not self._samples:
                    self.refused = str(error)
                    return
                sample = None
            if sample is not None:
                self._samples.append(sample)
            time.sleep(self._source.period_s)
