"""Finds cycles by what the job names: `ebbtide.step`, record_function, NVTX ranges."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import groupby, pairwise

from ebbtide.analysis.metrics.iterations import intervals, on_device_clock
from ebbtide.features.cycles.spans import (
    CycleSpan,
    CycleSpans,
    NamedTime,
    outermost,
    within,
)
from ebbtide.profiler.trace import Trace

# Names of profilers and of torch itself, which are no parts of a cycle.
_OWN_NAMES = re.compile(
    r"ProfilerStep|Optimizer\.|enumerate\(|nccl|gloo|autograd|DistributedDataParallel"
    r"|FSDP|Torch-Compiled|## ",
    re.IGNORECASE,
)
# Words of parts that an iteration of training does not have.
_CYCLE_WORDS = re.compile(
    r"roll.?out|generat|sampl|log.?prob|reward|advantage|sleep|wake|sync.?weight"
    r"|inner|outer|critic|discriminator|actor|episode|collect",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"\s*[#:=\[(]?\s*\d+\s*[\])]?")
_MIN_CYCLES = 2
# Of unmarked ranges: a name may recur by chance.
_MIN_CYCLES_OF_RANGES = 3
# A name that recurs less often than this share of the most frequent one is rare: an
# evaluation, a checkpoint.
_RARE_SHARE = 1 / 3
_MIN_AGREEMENT = 0.8


def marked_cycles(trace: Trace, rank: int) -> CycleSpans | None:
    """Return the cycles by `ebbtide.step`; None where there are none."""
    on_device = on_device_clock(trace)
    rows = on_device.columns(rank, "marks")
    if not len(rows):
        return None
    starts, ends = rows.ints("start_ns").copy(), rows.ints("end_ns").copy()
    has_gpu = rows.recorded("gpu_start_ns") & rows.recorded("gpu_end_ns")
    starts[has_gpu] = rows.ints("gpu_start_ns")[has_gpu]
    ends[has_gpu] = rows.ints("gpu_end_ns")[has_gpu]
    columns = zip(rows.texts("name"), starts.tolist(), ends.tolist(), strict=True)
    ranges = [NamedTime(str(name), start, end) for name, start, end in columns]
    threads = rows.ints("thread").tolist()
    cycles = _cut(_of_main_thread(ranges, threads))
    if len(cycles) < _MIN_CYCLES:
        return None
    return CycleSpans("marks", tuple(cycles), on_device)


def named_cycles(trace: Trace, rank: int) -> CycleSpans | None:
    """Return the cycles by the ranges that the job names for a profiler.

    They are cycles if they have several iterations each, or parts that training alone
    does not have; None else.
    """
    if not len(intervals(trace, rank).numbers):
        return None
    on_device = on_device_clock(trace)
    rows = on_device.columns(rank, "annotations")
    starts, ends = rows.ints("start_ns").tolist(), rows.ints("end_ns").tolist()
    ranges, threads = [], []
    columns = zip(
        rows.texts("name"), starts, ends, rows.ints("thread").tolist(), strict=True
    )
    for name, start, end, thread in columns:
        if not _OWN_NAMES.search(str(name)):
            plain = _NUMBER.sub("", str(name)).strip() or str(name)
            ranges.append(NamedTime(plain, start, end))
            threads.append(thread)
    cycles = _cut(_of_main_thread(ranges, threads))
    if len(cycles) < _MIN_CYCLES_OF_RANGES or not _is_outer(trace, rank, cycles):
        return None
    return CycleSpans("ranges", tuple(cycles), on_device)


def _is_outer(trace: Trace, rank: int, cycles: Sequence[CycleSpan]) -> bool:
    names = {part.name for cycle in cycles for part in cycle.parts}
    if len(names) < 2:
        return False
    if any(_CYCLE_WORDS.search(name) for name in names):
        return True
    # A part with several iterations in it is no part of an iteration.
    ends = intervals(trace, rank).ends.tolist()
    several = [
        bisect_right(ends, part.end_ns) - bisect_left(ends, part.start_ns) > 1
        for cycle in cycles
        for part in cycle.parts
    ]
    return sum(several) >= len(cycles)


def _of_main_thread(ranges: list[NamedTime], threads: list[int]) -> list[NamedTime]:
    """Return the ranges of the thread that names most time."""
    times: defaultdict[int, int] = defaultdict(int)
    for one, thread in zip(ranges, threads, strict=True):
        times[thread] += one.length_ns
    if not times:
        return []
    main = max(times, key=lambda thread: times[thread])
    pairs = zip(ranges, threads, strict=True)
    return [one for one, thread in pairs if thread == main]


def _cut(ranges: list[NamedTime]) -> list[CycleSpan]:
    """Return the whole cycles of ranges."""
    outer = outermost(ranges)
    if len({one.name for one in outer}) == 1:
        around = [_around(one, ranges) for one in outer]
        if sum(bool(cycle.parts) for cycle in around) > len(around) / 2:
            return around
    starts = _starts(outer)
    cycles = []
    for start, end in pairwise((*starts, len(outer))):
        parts = outer[start:end]
        is_last = end == len(outer)
        end_ns = parts[-1].end_ns if is_last else outer[end].start_ns
        cycles.append(CycleSpan(parts[0].start_ns, end_ns, tuple(parts)))
    return _whole(cycles)


def _around(one: NamedTime, ranges: list[NamedTime]) -> CycleSpan:
    """Return a range as a cycle, whose parts are the ranges in it."""
    inner = within(ranges, one.start_ns, one.end_ns)
    parts = outermost([part for part in inner if part != one])
    return CycleSpan(one.start_ns, one.end_ns, tuple(parts))


def _starts(outer: list[NamedTime]) -> list[int]:
    """Return the positions of the ranges with which cycles begin."""
    runs = [(name, [*group]) for name, group in groupby(enumerate(outer), _name)]
    counts = Counter(name for name, _ in runs)
    if not counts:
        return []
    least = _RARE_SHARE * max(counts.values())
    runs = [run for run in runs if counts[run[0]] >= least]
    names = [name for name, _ in runs]
    pattern = names[: _period(names)]
    every = pattern.count(names[0])
    begins = [group[0][0] for name, group in runs if name == names[0]]
    if len(counts) == 1:
        # One name alone: each of its ranges begins a cycle.
        return [*range(len(outer))]
    return begins[::every]


def _name(numbered: tuple[int, NamedTime]) -> str:
    return numbered[1].name


def _period(names: list[str]) -> int:
    """Return after how many names the same ones follow."""
    for period in range(1, len(names) // 2 + 1):
        same = [a == b for a, b in zip(names, names[period:], strict=False)]
        if sum(same) >= _MIN_AGREEMENT * len(same):
            return period
    return len(names)


def _whole(cycles: list[CycleSpan]) -> list[CycleSpan]:
    """Return the cycles without a first or a last one that lacks parts of all others:
    the recording began or ended in it."""
    names = [{part.name for part in cycle.parts} for cycle in cycles]
    if len(cycles) < 3:
        return cycles
    usual = set.intersection(*names[1:-1])
    first = 0 if usual <= names[0] else 1
    last = len(cycles) if usual <= names[-1] else len(cycles) - 1
    return cycles[first:last]
