"""Figures of a recorded job, for the job itself: `ebbtide.metrics`."""

from __future__ import annotations

from typing import Any

from ebbtide.phases import OTHER, PHASES
from ebbtide.profiler.agent import start
from ebbtide.profiler.agent.spool import POOLS

PREFIX = "ebbtide/"


def metrics() -> dict[str, float]:
    """Return figures of the last complete iteration of this process.

    Returns:
        Plain numbers; a figure that is not known is absent. Empty where this process is not being recorded, or no
        iteration has ended. Sizes are bytes.

        - `ebbtide/iteration`: its number
        - `ebbtide/iteration_seconds`, and `ebbtide/phase_seconds/PHASE` for forward, backward, update and other
        - `ebbtide/peak_bytes/POOL`: largest reading of each memory pool that the process counts
        - `ebbtide/capacity_bytes`, `ebbtide/free_bytes`: the device's memory, and the least of it that was free
    """
    recorder = start.current_recorder()
    # The recorder may be that of another version of ebbtide.
    figures = getattr(recorder, "figures", None)
    if figures is None:
        return {}
    times = next(figures.times(), None)
    if times is None:
        return {}
    phase_ns = dict(zip(PHASES, times.phase_ns, strict=True))
    span_ns = times.end_ns - times.start_ns
    phase_ns[OTHER] = max(0, span_ns - sum(phase_ns.values()))
    return {
        f"{PREFIX}iteration": times.number,
        f"{PREFIX}iteration_seconds": span_ns / 1e9,
        **{f"{PREFIX}phase_seconds/{phase}": length_ns / 1e9 for phase, length_ns in phase_ns.items()},
        **_memory(recorder, figures.peaks(times.number)),
    }


def _memory(recorder: Any, peaks: dict[tuple[int, int], int]) -> dict[str, float]:
    sizes = {POOLS[pool]: size for (pool, _), size in peaks.items()}
    return {f"{PREFIX}peak_bytes/{pool}": size for pool, size in sizes.items()}
