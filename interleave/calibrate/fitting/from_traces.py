"""A machine fitted from traces of jobs that ran on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from ebbtide.analysis.metrics.devices import first_device
from ebbtide.errors import MachineError
from ebbtide.interleave.calibrate.fitting.fit import Fit, Sample, fit, sample_of
from ebbtide.interleave.calibrate.fitting.from_steps import StepRates, step_rates
from ebbtide.machines.machine import Machine
from ebbtide.profiler.trace import Trace, open_trace
from ebbtide.units import bytes_text


def machine_of(paths: Sequence[Path], name: str) -> Machine:
    """The machine that explains these traces best. more.fit: how well it does (see `Fit`), with the policies that the
    traces ran under. Rates that sub-steps of recorded jobs tell are taken from them, not fitted. Raises MachineError
    for a trace that does not tell how it was offloaded, and for traces of cards of different size."""
    traces = [open_trace(path) for path in paths]
    told = [step_rates(trace) for trace in traces]
    if any(_on_cpu(trace) for trace in traces):
        return _without_gpu(traces, told, name)
    samples = [_sample(trace, steps) for trace, steps in zip(traces, told, strict=True)]
    names = [sample.name for sample in samples]
    if len(set(names)) < len(names):
        samples = [replace(sample, name=str(path)) for sample, path in zip(samples, paths, strict=True)]
    known = Machine(gpu_memory_bytes=_gpu_memory(traces), host_memory_bytes=_host_memory(traces), **_rates(told))
    found = fit(samples, known, name)
    about = _about(found, {sample.name: sample.policy for sample in samples})
    # No fit tells more digits than these.
    rates = {key: float(f"{getattr(found.machine, key):.4g}") for key in found.uncertainty}
    return replace(found.machine, **rates, more={"fit": about})  # type: ignore[arg-type]


def _sample(trace: Trace, steps: StepRates | None) -> Sample:
    """Without the passes that DeepSpeed makes and no plan has."""
    sample = sample_of(trace)
    if sample.policy.partition(",")[0] == "adaptive":
        raise MachineError(
            f"{trace.path} ran under adaptive, whose plan follows the machine: fit from a run of another policy"
        )
    return replace(sample, update_s=sample.update_s - steps.beside_s) if steps is not None else sample


def _rates(told: Sequence[StepRates | None]) -> dict[str, Any]:
    """The median of each rate that sub-steps tell."""
    found = [steps.rates for steps in told if steps is not None]
    return {key: median(rates[key] for rates in found if key in rates) for key in {k for rates in found for k in rates}}


def _on_cpu(trace: Trace) -> bool:
    return bool(trace.ranks) and first_device(trace, trace.ranks[0]).get("kind") == "cpu"


def _without_gpu(traces: Sequence[Trace], told: Sequence[StepRates | None], name: str) -> Machine:
    """What jobs without a GPU tell: nothing can be fitted, and of the link they know nothing."""
    for trace, steps in zip(traces, told, strict=True):
        if not _on_cpu(trace):
            raise MachineError(f"{trace.path} ran on a GPU and others did not: fit each machine from its own")
        if steps is None:
            raise MachineError(
                f"{trace.path} ran without a GPU and has no sub-steps of DeepSpeed's: measure with `ebbtide calibrate`"
            )
    how = {key: text for steps in told if steps is not None for key, text in steps.how.items()}
    memory = _host_memory(traces)
    if memory is not None:
        how["host_memory_bytes"] = "told by the traces"
    notes = ["these jobs ran without a GPU: of a link and of updates on a GPU they tell nothing"]
    more = {"measured": {key: {"how": text} for key, text in how.items()}, "notes": notes}
    return Machine(name=name, host_memory_bytes=memory, **_rates(told), more=more)


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
