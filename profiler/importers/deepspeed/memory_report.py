"""The report of memory that Megatron prints after its first iterations, in its own logs and in those with DeepSpeed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from ebbtide.profiler.trace import RankBuilder

# Its MB are MiB: `report_memory` in megatron/training/utils.py divides by 1024 * 1024.
_REPORT = re.compile(
    r"\[Rank (\d{1,7})\] \(after \d{1,12} iterations\) memory \(MB\) \| allocated: [\d.]{1,32} \| "
    r"max allocated: (\d{1,9}(?:\.\d{1,20})?) \| reserved: [\d.]{1,32} \| max reserved: (\d{1,9}\.\d{1,20})"
)


class MemoryReport(NamedTuple):
    """Memory that Megatron printed for a rank, in bytes.

    Attributes:
        rank: The rank.
        peak_allocated: Peak of allocated memory since the start of the job.
        peak_reserved: Peak of reserved memory since the start of the job.
    """

    rank: int
    peak_allocated: int
    peak_reserved: int


def read_reports(text: str) -> Iterator[MemoryReport]:
    """Yield the reports in a line of a log. Ranks may break into each other's lines."""
    if "memory (MB)" in text:
        for rank, allocated, reserved in _REPORT.findall(text):
            yield MemoryReport(int(rank), round(float(allocated) * 2**20), round(float(reserved) * 2**20))


def add_report(entry: RankBuilder, report: MemoryReport, start_ns: int) -> None:
    """Add the peaks that Megatron reported of a rank, from the start of the first iteration on."""
    device = entry.meta["devices"][0]["device"]
    entry.memory(start_ns, report.peak_allocated, "allocated", device)
    entry.memory(start_ns, report.peak_reserved, "reserved", device)
