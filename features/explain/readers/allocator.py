"""Reads the figures of torch's allocator: `memory_summary()`, and `memory_stats()` as
JSON or as a dictionary of Python.

Their forms are those of `torch/cuda/memory.py`.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from ebbtide.features.explain.pasted import PastedText
from ebbtide.features.explain.readers.out_of_memory import size_bytes
from ebbtide.features.explain.record import Place, Record, reader
from ebbtide.units import bytes_text

_HEADER = re.compile(r"PyTorch CUDA memory summary, device ID (\d+)")
_COUNTS = re.compile(r"CUDA OOMs:\s*(\d+).*cudaMalloc retries:\s*(\d+)")
_CELL = r"\|\s*(\d[\d.,]*) ?(B|[KMGT]i?B)\s*"
_ROW = re.compile(rf"\|\s*([A-Z][A-Za-z -]+?)\s*{_CELL}{_CELL}{_CELL}{_CELL}\|")
_ROW_POOLS = {
    "Allocated memory": "allocated",
    "Active memory": "active",
    "Requested memory": "requested",
    "GPU reserved memory": "reserved",
    "Non-releasable memory": "inactive_split",
}
_STATISTIC = re.compile(
    r"['\"]?(allocated|active|requested|reserved|inactive_split)_bytes\.all\."
    r"(current|peak)['\"]?\s*[:,=]\s*(\d+)"
)
_STATISTIC_COUNT = re.compile(r"['\"]?num_(ooms|alloc_retries)['\"]?\s*[:,=]\s*(\d+)")


@dataclass(frozen=True, kw_only=True)
class AllocatorFigures(Record):
    """The figures of torch's allocator at one time; pools that are missing have none.

    `inactive_split` is what lies free in segments that tensors use in part.
    """

    device: int | None
    current_bytes: dict[str, int]
    peak_bytes: dict[str, int]
    errors: int | None
    retries: int | None

    @property
    def title(self) -> str:
        device = "" if self.device is None else f" of GPU {self.device}"
        allocated = bytes_text(self.current_bytes.get("allocated"))
        reserved = bytes_text(self.current_bytes.get("reserved"))
        return f"torch's memory{device}: {allocated} allocated, {reserved} reserved"


@reader
def read_summaries(text: PastedText) -> Iterator[AllocatorFigures]:
    header = None
    current: dict[str, int] = {}
    peak: dict[str, int] = {}
    counts: tuple[int | None, int | None] = (None, None)
    first = last = 0
    for line in text.lines:
        if match := _HEADER.search(line.text):
            if current:
                yield _figures(text, header, current, peak, counts, first, last)
            header, current, peak, counts = int(match[1]), {}, {}, (None, None)
            first = line.number
        elif match := _COUNTS.search(line.text):
            counts = int(match[1]), int(match[2])
        elif match := _ROW.search(line.text):
            pool = _ROW_POOLS.get(match[1])
            if pool is not None and pool not in current:
                current[pool] = size_bytes(match[2], match[3])
                peak[pool] = size_bytes(match[4], match[5])
                first, last = first or line.number, line.number
    if current:
        yield _figures(text, header, current, peak, counts, first, last)


@reader
def read_statistics(text: PastedText) -> Iterator[AllocatorFigures]:
    figures: dict[str, dict[str, int]] = {"current": {}, "peak": {}}
    counts: dict[str, int] = {}
    numbers = []
    for line in text.lines:
        if "_bytes.all." not in line.text and "num_" not in line.text:
            continue
        for pool, kind, size in _STATISTIC.findall(line.text):
            figures[kind][pool] = int(size)
            numbers.append(line.number)
        counts.update({n: int(size) for n, size in _STATISTIC_COUNT.findall(line.text)})
    if figures["current"]:
        both = counts.get("ooms"), counts.get("alloc_retries")
        ends = numbers[0], numbers[-1]
        yield _figures(text, None, figures["current"], figures["peak"], both, *ends)


def _figures(
    text: PastedText,
    device: int | None,
    current: dict[str, int],
    peak: dict[str, int],
    counts: tuple[int | None, int | None],
    first: int,
    last: int,
) -> AllocatorFigures:
    return AllocatorFigures(
        place=Place(text_name=text.name, first_line=first, last_line=last),
        device=device,
        current_bytes=current,
        peak_bytes=peak,
        errors=counts[0],
        retries=counts[1],
    )
