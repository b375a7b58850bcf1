"""A machine fitted from traces of jobs that ran on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ebbtide.analysis.devices import first_device
from ebbtide.analysis.units import bytes_text
from ebbtide.interleave.errors import MachineError
from ebbtide.interleave.fit import Fit, fit, sample_of
from ebbtide.interleave.machine import Machine
from ebbtide.profiler.trace import Trace, open_trace


def machine_of(paths: Sequence[Path], name: str) -> Machine:
    """The machine that explains these traces best. more.fit: how well it does (see `Fit`), with the policies that the
    traces ran under. Raises MachineError for a trace that does not tell how it was offloaded, and for traces of cards
    of different size."""
    traces = [open_trace(path) for path in paths]
    samples = [sample_of(trace) for trace in traces]
    names = [sample.name for sample in samples]
    if len(set(names)) < len(names):
        samples = [replace(sample, name=str(path)) for sample, path in zip(samples, paths, strict=True)]
    found = fit(samples, Machine(gpu_memory_bytes=_gpu_memory(traces), host_memory_bytes=_host_memory(traces)), name)
    about = _about(found, {sample.name: sample.policy for sample in samples})
    # No fit tells more digits than these.
    rates = {key: float(f"{getattr(found.machine, key):.4g}") for key in found.uncertainty}
    return replace(found.machine, **rates, more={"fit": about})  # type: ignore[arg-type]


def _about(found: Fit, policies: dict[str, str]) -> dict[str, Any]:
    return {
        "policies": policies,
        "residuals": {name: round(residual, 4) for name, residual in found.residuals.items()},
        "uncertainty": {key: round(factor, 3) for key, factor in found.uncertainty.items()},
        "unidentified": list(found.unidentified),
    }


def _gpu_memory(traces: Sequence[Trace]) -> float | None:
    sizes = {
        device["capacity_bytes"]
        for trace in traces
        if (device := first_device(trace, trace.ranks[0])).get("kind") == "cuda" and device.get("capacity_bytes")
    }
    if len(sizes) > 1:
        both = ", ".join(bytes_text(size) for size in sorted(sizes))
        raise MachineError(f"these traces are of GPUs of different size ({both}): fit each machine from its own")
    return next(map(float, sizes), None)


def _host_memory(traces: Sequence[Trace]) -> float | None:
    """A rank's part of the host's memory, where the ranks of one host are known."""
    shares = []
    for trace in traces:
        capacity = ((trace.meta.get("host") or {}).get("cpu") or {}).get("capacity_bytes")
        first = trace.rank(trace.ranks[0])
        here = sum(trace.rank(rank).get("host") == first.get("host") for rank in trace.ranks)
        if capacity:
            shares.append(capacity / here)
    return min(shares, default=None)
