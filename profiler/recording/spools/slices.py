"""Reads the slices of copies and kernels that a process has written."""

import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pandas as pd
from msgspec import UNSET

from ebbtide.profiler.chrome_trace.gpu_activities import GpuActivities
from ebbtide.profiler.chrome_trace.reader import ChromeTrace
from ebbtide.profiler.trace.frames import frame
from ebbtide.profiler.trace.untrusted import open_regular

# The name of a slice, which the agent gives it.
_SLICE = re.compile(r"copies-(\d+)-(\d+)\.json$")


def read_slices(
    paths: Iterable[Path], wall_to_monotonic_ns: int
) -> tuple[dict[str, pd.DataFrame], list[str]]:
    """Return the tables of a process's slices, and a line for each broken file.

    A broken file could not be read to its end. `wall_to_monotonic_ns`: added to their
    times, which are Unix times.
    """
    parts = {table: [frame(table)] for table in ("transfers", "kernels", "calls")}
    problems = []
    for path in paths:
        activities = GpuActivities()
        try:
            with open_regular(path) as file:
                trace = ChromeTrace(file)
                for batch in trace.batches():
                    activities.add([event for event in batch if event.ts is not UNSET])
        except (OSError, ValueError) as error:
            problems.append(f"the copies in {path.name} could not be read ({error})")
            continue
        base_ns = trace.base_ns + wall_to_monotonic_ns
        columns = (
            activities.transfers(base_ns),
            activities.kernels(base_ns),
            activities.calls(base_ns),
        )
        for table, values in zip(parts, columns, strict=True):
            parts[table].append(frame(table, values))
        if trace.stop_reason or trace.skipped:
            problems.append(
                f"the copies in {path.name} could not all be read "
                f"({trace.stop_reason or 'some are damaged'})"
            )
    return {
        table: frame(table, pd.concat(frames)) for table, frames in parts.items()
    }, problems


def slice_spans(paths: Iterable[Path], phases: pd.DataFrame) -> list[tuple[int, int]]:
    """Return the spans of time, in ns, that the slices cover, ascending and disjoint,
    from the names of the slices' files.

    The agent starts a slice just after an iteration ends: it covers the time from that
    end on."""
    phase_ends = np.sort(phases["end_ns"].to_numpy(np.int64))
    slices = sorted(
        (int(match[1]), int(match[2]))
        for path in paths
        if (match := _SLICE.search(path.name))
    )
    spans: list[tuple[int, int]] = []
    for start, end in slices:
        before = phase_ends[: np.searchsorted(phase_ends, start, side="right")]
        start = int(before[-1]) if len(before) else start
        if spans and start <= spans[-1][1]:
            spans[-1] = (spans[-1][0], end)
        else:
            spans.append((start, end))
    return spans
