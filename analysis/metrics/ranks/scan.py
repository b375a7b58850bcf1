"""Computes a result part by part, a few ranks at a time, here or in other processes.

The tables of a large job do not fit into memory together. For each part, the whole
result is computed from its ranks alone and kept by rank: the result of all ranks then
needs no table again.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from ebbtide.analysis.metrics.cache import KeptResults, keep_results, kept_results
from ebbtide.analysis.metrics.devices import free_pool, peak_pool
from ebbtide.analysis.metrics.iterations import steady_iterations
from ebbtide.analysis.metrics.ranks.rank_series import origin_ns
from ebbtide.errors import TraceError, UserError
from ebbtide.host_limits import cores
from ebbtide.profiler.trace import Trace
from ebbtide.profiler.trace.files import complete_trace
from ebbtide.workers import WorkerDied

# Computes a result of a trace. Figures of ranks that it reads must be kept by
# `once_per_trace`.
Read = Callable[[Trace], object]
# Two ranks of a part are compared with each other, as the ranks of the whole trace are.
_MIN_RANKS_PER_PART = 2
# Each task parses metadata and imports what it needs.
_MIN_RANKS_PER_TASK = 4
# A part has as many ranks with small tables as take this many bytes on disk, and there
# are at least this many parts.
_PART_BYTES = 16e6
_MIN_PARTS = 16
# Of ranks with fewer bytes, threads wait for each other. So do more threads, and each
# holds tables of a part.
_MIN_RANK_BYTES_FOR_THREADS = 1e6
_MAX_THREADS = 4
# Tables of fewer bytes on disk stay in memory: parts would only repeat work.
_MIN_BYTES = 50e6


@dataclass(frozen=True)
class ScanTask:
    """Some ranks of a trace whose figures one process computes."""

    path: Path  # The folder of the trace, absolute.
    raw_meta: dict[str, Any]  # Its metadata with these ranks alone.
    ranks: tuple[int, ...]
    read: Read  # Computes the result.
    kept: KeptResults  # Results of the whole trace, which all ranks need.


# Runs a function on tasks by key, and yields (key, outcome) as each is finished, as the
# runners of `ebbtide.workers` do.
ScanRunner: TypeAlias = Callable[
    [Callable[[ScanTask], KeptResults], Mapping[str, ScanTask]],
    Iterator[tuple[str, KeptResults | WorkerDied]],
]


def read_by_parts(trace: Trace, read: Read) -> None:
    """Compute a result part by part here, and keep what was computed of each rank."""
    if len(trace.ranks) <= _MIN_RANKS_PER_PART or trace.stored_bytes < _MIN_BYTES:
        return
    parts, kept = _parts(trace, _MIN_RANKS_PER_PART), _of_all_ranks(trace)

    def read_part(ranks: Sequence[int]) -> None:
        keep_results(trace, _read_part(trace, ranks, kept, read))

    has_small_ranks = trace.stored_bytes < _MIN_RANK_BYTES_FOR_THREADS * len(
        trace.ranks
    )
    with ThreadPoolExecutor(
        1 if has_small_ranks else min(cores(), _MAX_THREADS)
    ) as threads:
        list(threads.map(read_part, parts))


def scan(task: ScanTask) -> KeptResults:
    """Compute the result of a task, and return what was computed of its ranks."""
    if not task.path.is_dir():
        raise TraceError(
            f"{task.path} is not on the worker: it must be in a folder that all nodes "
            "share, or at a URL"
        )
    trace = complete_trace(task.path, task.raw_meta)
    return _read_part(trace, task.ranks, task.kept, task.read)


def scan_ranks(
    trace: Trace,
    read: Read,
    runner: ScanRunner,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> None:
    """Compute a result part by part elsewhere, and keep each rank's results here.

    Workers open the trace by its path. `progress`: called with the numbers of finished
    and of all ranks, at the start and after each task. Raises UserError if a worker
    died, TraceError if the trace is damaged or workers cannot read its path.
    """
    path, kept = trace.path.resolve(), _of_all_ranks(trace)
    tasks = {
        str(part[0]): ScanTask(path, trace.of_ranks(part).raw_meta, part, read, kept)
        for part in _parts(trace, _MIN_RANKS_PER_TASK)
    }
    finished = 0
    progress(finished, len(trace.ranks))
    with closing(runner(scan, tasks)) as outcomes:  # type: ignore[type-var]
        for key, outcome in outcomes:
            if isinstance(outcome, WorkerDied):
                raise UserError(
                    f"ranks {key} and following could not be read: {outcome}; try "
                    "fewer --jobs"
                )
            keep_results(trace, outcome)
            finished += len(tasks[key].ranks)
            progress(finished, len(trace.ranks))


def _parts(trace: Trace, min_ranks: int) -> list[tuple[int, ...]]:
    rank_bytes = max(trace.stored_bytes, 1) / len(trace.ranks)
    size = max(
        min_ranks, min(int(_PART_BYTES / rank_bytes), len(trace.ranks) // _MIN_PARTS)
    )
    return [
        tuple(trace.ranks[start : start + size])
        for start in range(0, len(trace.ranks), size)
    ]


def _of_all_ranks(trace: Trace) -> KeptResults:
    """Return the figures of the whole trace that the figures of each rank depend on."""
    for of_all_ranks in (steady_iterations, free_pool, peak_pool, origin_ns):
        of_all_ranks(trace)
    return kept_results(trace)


def _read_part(
    trace: Trace, ranks: Sequence[int], kept: KeptResults, read: Read
) -> KeptResults:
    part = trace.of_ranks(ranks)
    for results in (kept, kept_results(trace, ranks)):
        keep_results(part, results)
    read(part)
    return kept_results(part, ranks)
