"""Keeps the last samples of the sampler, and adds up the bytes of the links."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ebbtide.profiler.agent import spool as kinds
from ebbtide.profiler.agent.spool import MISSING
from ebbtide.profiler.live.process_tail import MAX_RECORDS
from ebbtide.profiler.live.records import outdated_memory
from ebbtide.profiler.live.spool_tail import SpoolTail
from ebbtide.profiler.trace.link_samples import sample_starts, valid_rates
from ebbtide.profiler.trace.spool_records import RECORD, Records

DIRECTIONS = ("h2d", "d2h")
# Samples so long before the first kept iteration are kept, too: they hold, or have a window, that reaches into it.
_MARGIN_NS = 2_000_000_000
# Spacings whose median tells a gap, per device and direction.
_SPACINGS = 512


class SamplerTail:
    """Follows the spool of the sampler.

    Args:
        path: The spool.
        peaks: NVML number of a device -> peak bytes/s of its link in one direction, as far as known.
    """

    def __init__(self, path: Path, peaks: dict[int, float]) -> None:
        self.spool = SpoolTail(path)
        self._peaks = peaks
        self._records: Records = np.empty(0, RECORD)
        self._bytes: dict[tuple[int, str], float] = defaultdict(float)
        # The ends of the last samples, which spacings are computed from.
        self._ends: dict[tuple[int, str], npt.NDArray[np.int64]] = {}

    def poll(self, max_bytes: int) -> int:
        """Read new records; return their number. max_bytes: bytes to read at most."""
        records = self.spool.read(max_bytes)
        if not len(records):
            return 0
        self._add_bytes(records[records["kind"] == kinds.LINK])
        self._records = np.concatenate([self._records, records])
        if len(self._records) > MAX_RECORDS:
            self._records = self._records[-MAX_RECORDS // 2 :]
        return len(records)

    def trim(self, time_ns: int) -> None:
        """Drop the samples that no moment after `time_ns` depends on."""
        start_ns = time_ns - _MARGIN_NS
        kind = self._records["kind"]
        old = (kind != kinds.MEMORY) & (kind != kinds.HEADER) & (self._records["x"] < start_ns)
        self._records = self._records[~(old | outdated_memory(self._records, start_ns))]

    def window(self) -> Records:
        """Return the samples that are kept."""
        return self._records

    def link_bytes(self, device: int) -> dict[str, int] | None:
        """Return the bytes that the link of a device (its NVML number) moved per direction, since the recording began;
        None where nothing was sampled."""
        moved = {direction: round(self._bytes[device, direction]) for direction in self._directions(device)}
        return moved or None

    def _directions(self, device: int) -> list[str]:
        return [direction for direction in DIRECTIONS if (device, direction) in self._bytes]

    def _add_bytes(self, samples: Records) -> None:
        for device in np.unique(samples["small"]).tolist():
            of_device = samples[samples["small"] == device]
            for direction, column in zip(DIRECTIONS, "yz", strict=True):
                rows = of_device[of_device[column] != MISSING]
                if len(rows):
                    self._add(device, direction, rows["x"], rows["w"], rows[column].astype(np.float64))

    def _add(
        self,
        device: int,
        direction: str,
        ends: npt.NDArray[np.int64],
        windows: npt.NDArray[np.int64],
        rates: npt.NDArray[np.float64],
    ) -> None:
        before = self._ends.get((device, direction), np.empty(0, np.int64))
        count = len(before)
        all_ends = np.concatenate([before, ends])
        # Only those of the new samples are used; the others make the spacings.
        starts = sample_starts(all_ends, np.concatenate([np.zeros(count, np.int64), windows]))[count:]
        valid = valid_rates(rates, self._peaks.get(device))
        self._bytes[device, direction] += float((rates * (ends - starts) / 1e9)[valid].sum())
        self._ends[device, direction] = all_ends[-_SPACINGS:]
