"""Published DeepSpeed logs, and their figures read without the importer."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ebbtide.phases import PHASES
from tests.features.deepspeed.log_importer.made_logs import stamp_ns

PUBLISHED = Path(__file__).parents[5] / "shared" / "published" / "deep-optimizer-states"
LOGS = sorted(PUBLISHED.glob("*/*.log"))
MONITORED_LOGS = [
    log for log in LOGS if log.with_name(f"{log.stem}-monitor.csv").exists()
]

# By default: logs of one, two and four ranks on both machines, and one that ended
# before its first step.
_SHOWN = (
    "dp1-l40-h5120-a40-sl2048-gbs4-mbs4-ratio1-subg100000000-prefetch1-flush_async1-opt_gaps2",
    "dp2-l40-h5120-a40-sl2048-gbs8-mbs4-ratio1-subg100000000-prefetch1-flush_async1-opt_gaps2",
    "dp4-l40-h5120-a40-sl2048-gbs4-mbs1-ratio1-subg100000000-prefetch0-flush_async1-opt_gaps0",
    "dp4-l40-h5120-a64-sl2048-gbs4-mbs1-ratio0.5-subg100000000-prefetch1-flush_async1-opt_gaps2",
    "dp4-l40-h5120-a64-sl2048-gbs4-mbs1-ratio1.0-subg100000000-prefetch0-flush_async0-opt_gaps0",
)


def _each(logs: list[Path]) -> pytest.MarkDecorator:
    marked = [
        pytest.param(log, marks=[] if log.stem.endswith(_SHOWN) else pytest.mark.slow)
        for log in logs
    ]
    return pytest.mark.parametrize("log", marked, ids=[log.stem[4:] for log in logs])


published = pytest.mark.skipif(
    not LOGS, reason="the published measurements are not here (shared/published)"
)
each_log = _each(LOGS)
each_monitored_log = _each(MONITORED_LOGS)


def monitor_of(log: Path) -> Path:
    """Return the monitor file of the same run."""
    return log.with_name(f"{log.stem}-monitor.csv")


def world_size(log: Path) -> int:
    """Return the number of ranks in a published log's name."""
    match = re.search(r"-dp(\d+)-", log.name)
    assert match
    return int(match[1])


def printed_ms(log: Path) -> list[dict[str, float]]:
    """Return the timers of each whole step, by phase."""
    pattern = re.compile(r"\| fwd: ([\d.]+) \| bwd: ([\d.]+) \|.*\| step: ([\d.]+)")
    matches = [pattern.search(text) for text in log.read_text().splitlines()]
    return [
        dict(zip(PHASES, map(float, match.groups()), strict=True))
        for match in matches
        if match
    ]


def mark_times_ns(log: Path, text: str) -> list[int]:
    """Return the times of all lines with a text."""
    return [
        stamp_ns(log_line)
        for log_line in log.read_text().splitlines()
        if text in log_line
    ]


def unix_times_ns(log: Path, name: str) -> list[int]:
    """Return the Unix times of a timer: those of the four ranks for the first step,
    then for the second, and so on."""
    return [int(ns) for ns in re.findall(rf"<<<TIMER:{name},(\d+)>>>", log.read_text())]
