"""Figures of one GPU that is sampled beside the job, iteration by iteration."""

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ebbtide.features.live.agent.iteration_figures import IterationTimes
from ebbtide.profiler.agent import spool as kinds
from ebbtide.profiler.agent.spool import MISSING
from ebbtide.profiler.recording.spools.devices import sampled_gpu
from ebbtide.profiler.recording.spools.process_tail import (
    MAX_RECORDS,
    SpoolTail,
    outdated_memory,
)
from ebbtide.profiler.recording.spools.records import RECORD, Records
from ebbtide.profiler.trace.link_samples import sample_starts, valid_rates

DIRECTIONS = ("h2d", "d2h")
# Samples so long before the first kept iteration are kept, too: they hold, or have a
# window, that reaches into it.
_MARGIN_NS = 2_000_000_000
# Spacings whose median tells a gap, per device and direction.
_SPACINGS = 512


class SamplerTail:
    """Follows the spool of the sampler.

    `peaks`: NVML number -> peak bytes/s of its link in one direction.
    """

    def __init__(self, path: Path, peaks: dict[int, float]) -> None:
        self.spool = SpoolTail(path)
        self._peaks = peaks
        self.records: Records = np.empty(0, RECORD)  # Those that are kept.
        self._bytes: dict[tuple[int, str], float] = defaultdict(float)
        # The ends of the last samples, which spacings are computed from.
        self._ends: dict[tuple[int, str], npt.NDArray[np.int64]] = {}

    def poll(self, max_bytes: int) -> int:
        """Read new records; return their number. max_bytes: bytes to read at most."""
        records = self.spool.read(max_bytes)
        if not len(records):
            return 0
        self._add_bytes(records[records["kind"] == kinds.LINK])
        self.records = np.concatenate([self.records, records])
        if len(self.records) > MAX_RECORDS:
            self.records = self.records[-MAX_RECORDS // 2 :]
        return len(records)

    def trim(self, time_ns: int) -> None:
        """Drop the samples that no moment after `time_ns` depends on."""
        start_ns = time_ns - _MARGIN_NS
        kind = self.records["kind"]
        old = (
            (kind != kinds.MEMORY)
            & (kind != kinds.HEADER)
            & (self.records["x"] < start_ns)
        )
        self.records = self.records[~(old | outdated_memory(self.records, start_ns))]

    def link_bytes(self, device: int) -> dict[str, int] | None:
        """Return the bytes that the link of a device moved per direction so far.

        Return None where nothing was sampled.
        """
        directions = [
            direction for direction in DIRECTIONS if (device, direction) in self._bytes
        ]
        return {
            direction: round(self._bytes[device, direction]) for direction in directions
        } or None

    def _add_bytes(self, samples: Records) -> None:
        for device in np.unique(samples["small"]).tolist():
            of_device = samples[samples["small"] == device]
            for direction, column in zip(DIRECTIONS, "yz", strict=True):
                rows = of_device[of_device[column] != MISSING]
                if len(rows):
                    self._add(device, direction, rows, rows[column].astype(np.float64))

    def _add(
        self,
        device: int,
        direction: str,
        samples: Records,
        rates: npt.NDArray[np.float64],
    ) -> None:
        before = self._ends.get((device, direction), np.empty(0, np.int64))
        ends = np.concatenate([before, samples["x"]])
        # Only the spacings of the new samples are used; the others make the spacings.
        starts = sample_starts(
            ends, np.concatenate([np.zeros_like(before), samples["w"]])
        )[len(before) :]
        valid = valid_rates(rates, self._peaks.get(device))
        self._bytes[device, direction] += float(
            (rates * (samples["x"] - starts) / 1e9)[valid].sum()
        )
        self._ends[device, direction] = ends[-_SPACINGS:]


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
        """Return the link figures of the newest iteration that was sampled to its end:
        `peak_bytes/device`, `link_bytes/h2d` and `link_bytes/d2h`.

        Figures that were not sampled are left out. `times`: the times of iterations,
        the newest first."""
        while self._samples.poll(_PIECE_BYTES) and self._samples.spool.behind:
            pass
        records = self._samples.records
        records = records[records["small"] == self._index]
        memory = records[
            (records["kind"] == kinds.MEMORY) & (records["code"] == _DEVICE)
        ]
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

    def _moved(
        self, samples: Records, column: str, iteration: IterationTimes | None
    ) -> int | None:
        """Return the bytes of an iteration, at the rate of its samples.

        Return None where these cover less than half.
        """
        if iteration is None or not len(samples):
            return None
        ends, rates = samples["x"], samples[column].astype(np.float64)
        starts = sample_starts(ends, samples["w"])
        inside_ns = np.minimum(ends, iteration.end_ns) - np.maximum(
            starts, iteration.start_ns
        )
        inside_ns = np.where(
            valid_rates(rates, self._link_peak), np.maximum(inside_ns, 0), 0
        )
        covered_ns, length_ns = (
            float(inside_ns.sum()),
            iteration.end_ns - iteration.start_ns,
        )
        if not covered_ns or covered_ns < _MIN_COVERED * length_ns:
            return None
        return round(float((rates * inside_ns).sum()) / 1e9 * length_ns / covered_ns)


def open_samples(
    spools: Path, device: dict[str, Any], gpus: list[dict[str, Any]]
) -> SampledFigures | None:
    """Return the samples of a device; None where it is not sampled."""
    gpu = sampled_gpu(device, gpus)
    path = next(spools.glob("sampler-*.spool"), None)
    return (
        SampledFigures(SamplerTail(path, {}), gpu)
        if gpu is not None and "index" in gpu and path
        else None
    )


def _sampled(
    iterations: list[IterationTimes], samples: Records
) -> IterationTimes | None:
    """Return the newest iteration that ended before the last of the samples."""
    until_ns = int(samples["x"].max()) if len(samples) else 0
    return next((times for times in iterations if times.end_ns <= until_ns), None)


def _peak(memory: Records, iteration: IterationTimes) -> int:
    """Return the largest value in an iteration, the one at its start included."""
    first = max(
        0, int(np.searchsorted(memory["x"], iteration.start_ns, side="right")) - 1
    )
    last = int(np.searchsorted(memory["x"], iteration.end_ns, side="right"))
    return int(memory["y"][first : max(last, first + 1)].max())
