"""Reads the ranks of large traces in several processes, or on a cluster, before a command computes its figures."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import typer

from ebbtide.cli.render.progress import progress_bar

if TYPE_CHECKING:
    from ebbtide.profiler.trace import Trace

# Processes start in about a second; a rank of 10 MB takes as long.
_MIN_BYTES_FOR_PROCESSES = 100e6


def read_ranks(
    trace: Trace, figures: Callable[[Trace, int], object], jobs: int | None, scheduler: str | None = None
) -> None:
    """Compute figures of all ranks where processes or a cluster are asked for, or the trace is large.

    Args:
        trace: The trace, from `open_trace`.
        figures: Computes the figures of a rank: `summary_figures` or `finding_figures`.
        jobs: Number of processes; None: the number of cores for a large trace.
        scheduler: Address of a Dask scheduler.

    Raises:
        UserError: No cluster answers, or a worker died.
    """
    check_options(jobs, scheduler)
    from ebbtide.host_limits import cores

    is_on_disk = trace.meta.state == "complete"
    if not is_on_disk or len(trace.ranks) < 2:
        return
    processes = jobs or (cores() if _size(trace) >= _MIN_BYTES_FOR_PROCESSES else 1)
    if scheduler is None and processes == 1:
        return
    from ebbtide.analysis.metrics.ranks.scan import scan_ranks
    from ebbtide.workers import run_locally, run_on_cluster

    runner = partial(run_on_cluster, address=scheduler) if scheduler else partial(run_locally, jobs=processes)
    with progress_bar() as update:
        scan_ranks(trace, figures, runner, lambda done, total: update(f"{done} of {total} ranks", done, total))


def check_options(jobs: int | None, scheduler: str | None) -> None:
    """Check the options `--jobs` and `--scheduler`. Raises BadParameter where they do not fit."""
    if scheduler == "":
        raise typer.BadParameter("--scheduler needs an address, e.g. tcp://host:8786")
    if jobs == 0 or (jobs and scheduler):
        raise typer.BadParameter(
            "--jobs must be at least 1, and cannot be combined with --scheduler: a cluster has its own workers"
        )


def _size(trace: Trace) -> int:
    return sum(file.stat().st_size for file in trace.path.glob("rank-*/*.parquet"))
