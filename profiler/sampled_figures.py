"""Figures of one GPU that is sampled beside the job, iteration by iteration."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from ebbtide.profiler.agent import spool as kinds
from ebbtide.profiler.agent.iteration_figures import IterationTimes
from ebbtide.profiler.live.sampler_tail import DIRECTIONS, SamplerTail
from ebbtide.profiler.trace.link_samples import sample_starts, valid_rates
from ebbtide.profiler.trace.spool_devices import sampled_gpu
from ebbtide.profiler.trace.spool_records import Records

_DEVICE = kinds.POOLS.index("device")
_PIECE_BYTES = 1 << 23
# Where samples cover less than this share of an iteration, its bytes are not known.
_MIN_COVERED = 0.5


class SampledFigures:
    """Follows the samples of one GPU."""

    def __init__(self, samples: SamplerTail, gpu: dict[str, Any]) -> None:
        self._samples = samples
        self._index: int = gpu["index"]
        self._link_peak: float | None = (gpu.get("link") or {}).get("peak_bytes_per_s")

    def read(self, times: Iterable[IterationTimes]) -> dict[str, float]:
        """Return figures of the newest iteration that has been sampled to its end.

        `times`: those of iterations, the newest first.

        Returns:
            `peak_bytes/device`, and `link_bytes/h2d` and `link_bytes/d2h`; without those that were not sampled.
        """
        while self._samples.poll(_PIECE_BYTES) and self._samples.spool.behind:
            pass
        records = self._samples.window()
        records = records[records["small"] == self._index]
        memory = records[(records["kind"] == kinds.MEMORY) & (records["code"] == _DEVICE)]
        link = records[records["kind"] == kinds.LINK]
        iterations = list(times)
        if iterations:
            self._samples.trim(iterations[-1].start_ns)
        figures: dict[str, float] = {}
        iteration = _sampled(iterations, memory)
        if iteration is not None:
            figures["peak_bytes/device"] = _peak(memory, iteration)
        iteration = _sampled(iterations, link)
        for direction, column in zip(DIRECTIONS, "yz", strict=True):
            moved = self._moved(link[link[column] != kinds.MISSING], column, iteration)
            if moved is not None:
                figures[f"link_bytes/{direction}"] = moved
        return figures

    def _moved(self, samples: Records, column: str, iteration: IterationTimes | None) -> int | None:
        """Return the bytes of an iteration; None where samples cover less than half of it.

        What they do not cover is assumed to have the same rate.
        """
        if iteration is None or not len(samples):
            return None
        ends, rates = samples["x"], samples[column].astype(np.float64)
        starts = sample_starts(ends, samples["w"])
        inside_ns = np.minimum(ends, iteration.end_ns) - np.maximum(starts, iteration.start_ns)
        inside_ns = np.where(valid_rates(rates, self._link_peak), np.maximum(inside_ns, 0), 0)
        covered_ns, length_ns = float(inside_ns.sum()), iteration.end_ns - iteration.start_ns
        if not covered_ns or covered_ns < _MIN_COVERED * length_ns:
            return None
        return round(float((rates * inside_ns).sum()) / 1e9 * length_ns / covered_ns)


def open_samples(spools: Path, device: dict[str, Any], gpus: list[dict[str, Any]]) -> SampledFigures | None:
    """Find the samples of a device.

    Returns:
        The samples; None where the device is not sampled.
    """
    gpu = sampled_gpu(device, gpus)
    path = next(spools.glob("sampler-*.spool"), None)
    return SampledFigures(SamplerTail(path, {}), gpu) if gpu is not None and "index" in gpu and path else None


def _sampled(iterations: list[IterationTimes], samples: Records) -> IterationTimes | None:
    """Return the newest iteration that ended before the last of the samples."""
    until_ns = int(samples["x"].max()) if len(samples) else 0
    return next((times for times in iterations if times.end_ns <= until_ns), None)


def _peak(memory: Records, iteration: IterationTimes) -> int:
    """Return the largest value in an iteration, the one at its start included."""
    first = max(0, int(np.searchsorted(memory["x"], iteration.start_ns, side="right")) - 1)
    last = int(np.searchsorted(memory["x"], iteration.end_ns, side="right"))
    return int(memory["y"][first : max(last, first + 1)].max())
