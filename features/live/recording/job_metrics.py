"""Figures of a recorded job, for the job itself: `ebbtide.metrics`."""

from __future__ import annotations

import json
import threading
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ebbtide.features.live.agent.hooks import read_figures
from ebbtide.features.live.agent.iteration_figures import IterationFigures
from ebbtide.phases import OTHER, PHASES
from ebbtide.profiler.agent import start
from ebbtide.profiler.agent.spool import POOLS

if TYPE_CHECKING:
    from ebbtide.features.live.recording.sampled_figures import SampledFigures

# What a process counts itself, the most complete first: free memory is computed from it
# where no GPU is sampled.
_OWN_POOLS = ("reserved", "heap")


def metrics() -> dict[str, float]:
    """Return figures of the last complete iteration of this process, for its own logs.

    A call takes less than a millisecond, the first one on a GPU about half a second: it
    imports the reader of samples.

    Returns:
        Plain numbers, sizes in bytes. A figure that is not known is absent. Empty where
            this process is not being
        recorded, or no optimizer has stepped yet.

        - `ebbtide/iteration`: number of the iteration
        - `ebbtide/iteration_seconds`: its length
        - `ebbtide/phase_seconds/PHASE`: time of `forward`, `backward`, `update` and
          `other` in it
        - `ebbtide/peak_bytes/POOL`: largest reading of a memory pool: `allocated`,
          `reserved`, `pinned`, `device`, or, on the CPU, `heap`
        - `ebbtide/capacity_bytes`: memory of the device
        - `ebbtide/free_bytes`: the least memory that was free
        - `ebbtide/link_bytes/DIRECTION`: bytes that the link moved, `h2d` and `d2h`

        On a GPU times are the device's, so the iteration is the last one that the
            device has finished. The pool
        `device`, free memory and the link are sampled beside the job and written once a
            second: they are of the last
        iteration that has been sampled to its end.
    """
    recorder = start.current_recorder()
    figures = None if recorder is None else read_figures(recorder)
    times = next(figures.times(), None) if figures is not None else None
    if figures is None or times is None:
        return {}
    phase_ns = dict(zip(PHASES, times.phase_ns, strict=True))
    length_ns = times.end_ns - times.start_ns
    phase_ns[OTHER] = max(0, length_ns - sum(phase_ns.values()))
    own_peaks = {
        POOLS[pool]: size for (pool, _), size in figures.peaks(times.number).items()
    }
    result = {
        "iteration": times.number,
        "iteration_seconds": length_ns / 1e9,
        **{f"phase_seconds/{phase}": ns / 1e9 for phase, ns in phase_ns.items()},
        **{f"peak_bytes/{pool}": size for pool, size in own_peaks.items()},
        **_of_device(recorder.job_info, figures, own_peaks),
    }
    return {f"ebbtide/{name}": value for name, value in result.items()}


_lock = threading.Lock()


@lru_cache(maxsize=1)
def _device(job_info: Any) -> tuple[int | None, SampledFigures | None]:
    """Return the capacity of a recorded process's device, and its samples.

    A forked child has another `job_info`. Return None where the device is not sampled.
    """
    spools = Path(job_info.directory)
    host = json.loads((spools.parent / "meta.json").read_text(encoding="utf-8"))["host"]
    device = next(iter(job_info.devices), host["cpu"])
    if not (device.get("uuid") and host.get("gpus")):
        return device.get("capacity_bytes"), None
    from ebbtide.features.live.recording.sampled_figures import open_samples

    return device.get("capacity_bytes"), open_samples(spools, device, host["gpus"])


def _of_device(
    job_info: Any, figures: IterationFigures, own_peaks: dict[str, int]
) -> dict[str, float]:
    """Return capacity, free memory and figures of a sampled GPU, as far as known."""
    try:
        with _lock:
            capacity_bytes, samples = _device(job_info)
            sampled = samples.read(figures.times()) if samples is not None else None
    except (OSError, ValueError, LookupError, AttributeError):
        # The trace's folder was removed, or the recorder is of another version.
        return {}
    if capacity_bytes is None:
        return sampled or {}
    pool_peaks = [own_peaks[pool] for pool in _OWN_POOLS if pool in own_peaks]
    peak_bytes = (
        sampled.get("peak_bytes/device")
        if sampled is not None
        else next(iter(pool_peaks), None)
    )
    free = (
        {}
        if peak_bytes is None
        else {"free_bytes": max(0, capacity_bytes - peak_bytes)}
    )
    return {"capacity_bytes": capacity_bytes, **free, **(sampled or {})}
