"""Reads the slices in which a recorded job's copies and kernels were recorded: Chrome traces of torch's profiler."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from msgspec import UNSET

from ebbtide.profiler.chrome_trace.reader import ChromeTrace
from ebbtide.profiler.gpu_activities.activities import GpuActivities
from ebbtide.profiler.trace.schema import frame

# The name of a slice, which the agent gives it.
_SLICE = re.compile(r"copies-(\d+)-(\d+)\.json$")


class SliceTables(NamedTuple):
    """Contents of the slices of a process.

    Attributes:
        transfers: The table `transfers`.
        kernels: The table `kernels`.
        problems: A line for each file that could not be read, or not completely.
    """

    transfers: pd.DataFrame
    kernels: pd.DataFrame
    problems: list[str]


def read(paths: Iterable[Path], wall_to_monotonic_ns: int) -> SliceTables:
    """Read the slices of a process.

    Args:
        paths: The files.
        wall_to_monotonic_ns: Added to their times, which are Unix times.
    """
    transfers, kernels = [frame("transfers")], [frame("kernels")]
    problems = []
    for path in paths:
        activities = GpuActivities()
        try:
            with path.open("rb") as file:
                trace = ChromeTrace(file)
                for batch in trace.batches():
                    activities.add([event for event in batch if event.ts is not UNSET])
        except (OSError, ValueError) as error:
            problems.append(f"the copies in {path.name} could not be read ({error})")
            continue
        base_ns = trace.base_ns + wall_to_monotonic_ns
        transfers.append(frame("transfers", activities.transfers(base_ns)))
        kernels.append(frame("kernels", activities.kernels(base_ns)))
        if trace.stop_reason or trace.skipped:
            problems.append(
                f"the copies in {path.name} could not all be read ({trace.stop_reason or 'some are damaged'})"
            )
    return SliceTables(frame("transfers", pd.concat(transfers)), frame("kernels", pd.concat(kernels)), problems)


def spans_of(paths: Iterable[Path], phases: pd.DataFrame) -> list[tuple[int, int]]:
    """Return the spans of time, in ns, that the slices cover, from the names of their files.

    The agent starts a slice just after an iteration ends: it covers the time from that end on.

    Args:
        paths: The files.
        phases: The table `phases` of the process.

    Returns:
        (start, end) of each span, ascending and disjoint.
    """
    phase_ends = np.sort(phases["end_ns"].to_numpy(np.int64))
    slices = sorted((int(match[1]), int(match[2])) for path in paths if (match := _SLICE.search(path.name)))
    spans: list[tuple[int, int]] = []
    for start, end in slices:
        before = phase_ends[: np.searchsorted(phase_ends, start, side="right")]
        start = int(before[-1]) if len(before) else start
        if spans and start <= spans[-1][1]:
            spans[-1] = (spans[-1][0], end)
        else:
            spans.append((start, end))
    return spans
