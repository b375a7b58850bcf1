"""The figures and settings of a run that are compared, from its trace or from a stored
summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import pandas as pd

from ebbtide.analysis.metrics.activity.activity import kernels_ms
from ebbtide.analysis.metrics.framework_setup import framework_setup
from ebbtide.analysis.metrics.iterations import slowest_times, steady_iterations
from ebbtide.analysis.metrics.prediction import is_predicted
from ebbtide.analysis.metrics.summary import Totals, summarize, whole_trace
from ebbtide.errors import TraceError
from ebbtide.json_files import convert_object, read_object
from ebbtide.phases import ITERATION_PARTS
from ebbtide.profiler.trace import Trace, open_trace
from ebbtide.profiler.trace.metadata import RankInfo

PHASE_SIZES = ("min_free_bytes", "h2d_bytes", "d2h_bytes")


@dataclass(frozen=True)
class ComparedRun:
    """The figures of a run. Those that are not known are None, or absent from
    dictionaries."""

    path: str
    counted: int  # Number of steady iterations.
    # Of the steady iterations, slowest rank; by phase, and `iteration`.
    times_ms: dict[str, pd.Series[float]]
    sizes: dict[str, dict[str, float | None]]  # `PHASE_SIZES` of each phase.
    peaks: dict[str, int]  # Peak of each memory pool.
    totals: dict[str, float | None]  # Figures of the whole trace.
    settings: dict[str, Any] | None  # By their path in the metadata.
    is_predicted: bool  # Whether a dry run made it.
    # Time by kernel in an iteration of the first rank; empty where not recorded.
    kernels_ms: dict[str, float]
    operators_ms: dict[str, float]  # The same by operator that launched the kernels.


def run_of_trace(trace: Trace) -> ComparedRun:
    """Return the figures of a trace: peaks and times of the rank with the largest."""
    summary, times = summarize(trace), slowest_times(trace).frame
    times_ms = kernels_ms(trace, trace.ranks[0]) if trace.ranks else {}
    return ComparedRun(
        path=str(trace.path),
        counted=len(steady_iterations(trace).numbers),
        times_ms={
            part: times[part].dropna() for part in ("iteration", *ITERATION_PARTS)
        },
        sizes={
            size: {phase.phase: getattr(phase, size) for phase in summary.phases}
            for size in PHASE_SIZES
        },
        peaks=summary.memory.pools,
        totals=asdict(whole_trace(trace)),
        settings=job_settings(trace),
        is_predicted=is_predicted(trace),
        kernels_ms=times_ms.get("name", {}),
        operators_ms=times_ms.get("operator", {}),
    )


class _Phase(msgspec.Struct):
    phase: str
    min_free_bytes: float | None
    h2d_bytes: float | None
    d2h_bytes: float | None
    iterations_ms: list[float | None]


class _Pool(msgspec.Struct):
    peak_bytes: int


class _Memory(msgspec.Struct):
    pools: dict[str, _Pool]


class _Summary(msgspec.Struct):
    iterations: int
    warmup_iterations: int
    iterations_ms: list[float | None]
    phases: list[_Phase]
    memory: _Memory
    predicted: bool = False
    totals: Totals | None = None


def open_run(path: Path) -> ComparedRun:
    """Open a trace, or a file of `ebbtide summary --json`. Raises TraceError for
    others, and for earlier versions."""
    if not path.is_file():
        return run_of_trace(open_trace(path))
    values = read_object(path, "summary", TraceError)
    summary = convert_object(
        values, _Summary, f"{path}, as a summary of ebbtide summary --json", TraceError
    )
    times = {
        "iteration": summary.iterations_ms,
        **{phase.phase: phase.iterations_ms for phase in summary.phases},
    }
    if set(times) != {"iteration", *ITERATION_PARTS}:
        raise TraceError(
            f"{path}: phases must be {', '.join(ITERATION_PARTS)}, each once"
        )
    return ComparedRun(
        path=str(path),
        counted=summary.iterations - summary.warmup_iterations,
        times_ms={
            part: pd.Series(values, dtype=float).dropna()
            for part, values in times.items()
        },
        sizes={
            size: {phase.phase: getattr(phase, size) for phase in summary.phases}
            for size in PHASE_SIZES
        },
        peaks={pool: entry.peak_bytes for pool, entry in summary.memory.pools.items()},
        totals={} if summary.totals is None else asdict(summary.totals),
        settings=None,
        is_predicted=summary.predicted,
        kernels_ms={},
        operators_ms={},
    )


def job_settings(trace: Trace) -> dict[str, Any]:
    """Return the settings of the job, the host and the first rank, by their path in the
    metadata."""
    meta = trace.meta
    entry = meta.ranks[0] if meta.ranks else RankInfo(rank=0)
    settings: dict[str, Any] = {
        key: getattr(meta, key) for key in ("source", "warmup_iterations")
    }
    settings |= {
        "command": list(meta.command) or None,
        "ranks": len(meta.ranks),
        "devices": len(entry.devices),
    }
    settings |= {
        key: getattr(entry, key)
        for key in ("world_size", "python", "torch", "cuda", "transfers_recorded")
    }
    settings |= _with_prefix("threads", entry.threads)
    settings |= _with_prefix(
        "device", entry.main_device, ("device", "kind", "name", "capacity_bytes")
    )
    settings |= _with_prefix("link", entry.main_device.link)
    settings |= _with_prefix("model", entry.model)
    for number, optimizer in enumerate(entry.optimizers, start=1):
        settings |= _with_prefix(
            "optimizer" if number == 1 else f"optimizer {number}", optimizer
        )
    if (setup := framework_setup(trace)) is not None:
        keys = ("version", "stage", "policy", "subgroup_params", "subgroup_devices")
        settings |= _with_prefix(setup.key, setup.recorded, keys) | _with_prefix(
            setup.key, _flat(setup.config)
        )
    settings |= _with_prefix("host", meta.host, ("name", "kernel")) | _with_prefix(
        "host.cpu", meta.host.cpu, ("name", "cores")
    )
    for gpu in meta.host.gpus[:1]:
        settings |= _with_prefix("host.gpu", gpu, ("name", "driver", "link_source"))
    return settings | _with_prefix("options", meta.options)


def _flat(config: Any, prefix: str = "") -> dict[str, Any]:
    """Return the entries of nested sections, by the path to each."""
    entries: dict[str, Any] = {}
    for key, value in config.items() if isinstance(config, Mapping) else ():
        entries |= (
            _flat(value, f"{prefix}{key}.")
            if isinstance(value, Mapping)
            else {f"{prefix}{key}": value}
        )
    return entries


def _with_prefix(
    name: str, section: Any, keys: Sequence[str] | None = None
) -> dict[str, Any]:
    """Return `name.key` for keys of a section of the metadata, for all if None."""
    section = msgspec.to_builtins(section)
    return {
        f"{name}.{key}": section.get(key) for key in (section if keys is None else keys)
    }
