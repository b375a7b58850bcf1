"""Computes the figures of the ranks of a large trace in other processes, which keep no table longer than needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from ebbtide.analysis.metrics.cache import KeptResults, keep_results, kept_results
from ebbtide.analysis.metrics.devices import free_pool, peak_pool
from ebbtide.analysis.metrics.iterations import steady_iterations
from ebbtide.analysis.metrics.ranks.figures import RankFigures
from ebbtide.analysis.metrics.ranks.rank_series import origin_ns
from ebbtide.errors import UserError
from ebbtide.profiler.trace import Trace, open_trace
from ebbtide.workers import WorkerDied

# Each task opens the trace again, which takes as long as a part of a rank.
_RANKS_PER_TASK = 4


@dataclass(frozen=True)
class ScanTask:
    """Some ranks of a trace whose figures one process computes.

    Attributes:
        path: The folder of the trace, absolute.
        ranks: The ranks.
        figures: The figures.
        kept: Results of the whole trace, which all ranks need.
    """

    path: Path
    ranks: tuple[int, ...]
    figures: RankFigures
    kept: KeptResults


# Runs a function on tasks by key, and yields (key, outcome) as each is finished, as those of `ebbtide.workers` do.
ScanRunner: TypeAlias = Callable[
    [Callable[[ScanTask], list[KeptResults]], Mapping[str, ScanTask]],
    Iterator[tuple[str, list[KeptResults] | WorkerDied]],
]


def scan(task: ScanTask) -> list[KeptResults]:
    """Compute the figures of a task, and return the kept results of each of its ranks."""
    trace = open_trace(task.path)
    keep_results(trace, task.kept)
    for rank in task.ranks:
        task.figures(trace, rank)
    return [kept_results(trace, rank) for rank in task.ranks]


def scan_ranks(
    trace: Trace, figures: RankFigures, runner: ScanRunner, progress: Callable[[int, int], None] = lambda *_: None
) -> None:
    """Compute figures of all ranks elsewhere, and keep the results here. They equal those computed here.

    Args:
        trace: A trace on disk; other processes open it by its path.
        figures: The figures of a rank: `summary_figures` or `finding_figures`.
        runner: Runs tasks in processes of this machine, or on a cluster.
        progress: Called with the numbers of finished and of all ranks, at the start and after each task.

    Raises:
        UserError: A worker died.
        TraceError: The trace is damaged, or workers cannot read its path.
    """
    for of_all_ranks in (steady_iterations, free_pool, peak_pool, origin_ns):
        of_all_ranks(trace)
    path, kept = trace.path.resolve(), kept_results(trace)
    starts = range(0, len(trace.ranks), _RANKS_PER_TASK)
    parts = [tuple(trace.ranks[start : start + _RANKS_PER_TASK]) for start in starts]
    tasks = {str(part[0]): ScanTask(path, part, figures, kept) for part in parts}
    finished = 0
    progress(finished, len(trace.ranks))
    with closing(runner(scan, tasks)) as outcomes:  # type: ignore[type-var]
        for key, outcome in outcomes:
            if isinstance(outcome, WorkerDied):
                raise UserError(f"ranks {key} and following could not be read: {outcome}; try fewer --jobs")
            for results in outcome:
                keep_results(trace, results)
            finished += len(tasks[key].ranks)
            progress(finished, len(trace.ranks))
