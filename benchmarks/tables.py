"""Prints Markdown tables and the description of this machine for the other
benchmarks."""

from __future__ import annotations

import os
import platform
import re
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path


def percent(predicted: float, measured: float) -> str:
    """Return the relative error of a prediction."""
    return f"{100 * (predicted / measured - 1):+.1f} %"


def spread(values: Sequence[float], digits: int) -> str:
    """Return `median (minimum to maximum)`."""
    low, high = min(values), max(values)
    return (
        f"{statistics.median(values):.{digits}f} ({low:.{digits}f} to "
        f"{high:.{digits}f})"
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a Markdown table."""
    for cells in (head, ["---"] * len(head), *rows):
        print(f"| {' | '.join(cells)} |", flush=True)
    print()


def machine_line() -> str:
    """Return the processor, the cores that this process may use, and the version of
    Python."""
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    name = cpu.group(1) if cpu else platform.machine()
    return (
        f"{name}, {len(os.sched_getaffinity(0))} cores, Python "
        f"{platform.python_version()}"
    )
