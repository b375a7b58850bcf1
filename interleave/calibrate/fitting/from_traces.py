"""Fits a machine to traces of jobs that ran on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

from ebbtide.analysis.metrics.devices import first_device
from ebbtide.errors import MachineError
from ebbtide.interleave.calibrate.fitting.fit import MachineFit, box_of_ranks, fit
from ebbtide.interleave.calibrate.fitting.from_steps import StepRates, step_rates
from ebbtide.interleave.calibrate.fitting.samples import FitSample, sample_of
from ebbtide.interleave.replay.workload_from_trace import ranks_on_host
from ebbtide.machines.machine import Machine
from ebbtide.profiler.trace import Trace, open_trace
from ebbtide.units import bytes_text


def machine_of(paths: Sequence[Path], name: str) -> Machine:
    """Return the machine that explains these traces best.

    Rates that follow from the sub-steps of recorded jobs are taken from them and not fitted. The key `fit` of the
    machine file says how good the fit is (see `MachineFit`), and which policies the traces ran under.

    Args:
        paths: Traces of jobs on this machine.
        name: Name of the machine.

    Raises:
        MachineError: A trace does not record how it was offloaded, or the traces are of different GPUs.
    """
    traces = [open_trace(path) for path in paths]
    steps_of_traces = [step_rates(trace) for trace in traces]
    if any(_on_cpu(trace) for trace in traces):
        return _machine_without_gpu(traces, steps_of_traces, name)
    samples = [_sample(trace, steps) for trace, steps in zip(traces, steps_of_traces, strict=True)]
    names = [sample.name for sample in samples]
    if len(set(names)) < len(names):
        samples = [replace(sample, name=str(path)) for sample, path in zip(samples, paths, strict=True)]
    measured_rates = _median_rates(steps_of_traces)
    if len({sample.ranks for sample in samples}) > 1:
        # The rate of a kernel differs with the ranks on the host. The fit relates these rates.
        measured_rates.pop("cpu_update_params_per_s", None)
    measured = Machine(gpu_memory_bytes=_gpu_memory(traces), host_memory_bytes=_host_memory(traces), **measured_rates)
    result = fit(samples, measured, name)
    return replace(_rounded(result), extra={"fit": _about(result, samples), "notes": _notes(result, samples)})


def _notes(result: MachineFit, samples: Sequence[FitSample]) -> list[str]:
    """Return what other traces would add, in words."""
    if "step_overhead_s" in result.unidentified and len({sample.workload.params for sample in samples}) == 1:
        return [
            "step_overhead_s cannot be told from the rates, since all traces have as many parameters per rank: add "
            "traces of another model"
        ]
    return []


def _rounded(result: MachineFit) -> Machine:
    """Return the fitted machine with four digits per rate: no fit is accurate to more."""
    machine, box = result.machine, result.machine.box
    rates: dict[str, Any] = {
        key: _with_four_digits(getattr(machine, key)) for key in result.uncertainty if not key.startswith("box.")
    }
    machine = replace(machine, **rates)
    if box is None:
        return machine
    alone = {key: _with_four_digits(rate) for key, rate in asdict(box).items() if key.startswith("one_rank") and rate}
    return replace(machine, box=box_of_ranks(machine, box.ranks, alone))


def _with_four_digits(value: float) -> float:
    return float(f"{value:.4g}")


def _sample(trace: Trace, steps: StepRates | None) -> FitSample:
    """Return the measurements of a trace, without the passes of DeepSpeed that no plan has."""
    sample = sample_of(trace)
    return replace(sample, update_s=sample.update_s - steps.not_in_plans_s) if steps is not None else sample


def _median_rates(steps_of_traces: Sequence[StepRates | None]) -> dict[str, Any]:
    """Return the median of each rate that follows from sub-steps."""
    rates_of_traces = [steps.rates for steps in steps_of_traces if steps is not None]
    keys = {key for rates in rates_of_traces for key in rates}
    return {key: median(rates[key] for rates in rates_of_traces if key in rates) for key in keys}


def _on_cpu(trace: Trace) -> bool:
    return bool(trace.ranks) and first_device(trace, trace.ranks[0]).kind == "cpu"


def _machine_without_gpu(traces: Sequence[Trace], steps_of_traces: Sequence[StepRates | None], name: str) -> Machine:
    """Return what jobs without a GPU show of a machine: rates from their sub-steps, no link, nothing fitted."""
    for trace, steps in zip(traces, steps_of_traces, strict=True):
        if not _on_cpu(trace):
            raise MachineError(f"{trace.path} ran on a GPU and others did not: fit each machine from its own")
        if steps is None:
            raise MachineError(
                f"{trace.path} ran without a GPU and has no sub-steps of DeepSpeed's: measure with `ebbtide calibrate`"
            )
    how = {key: text for steps in steps_of_traces if steps is not None for key, text in steps.how.items()}
    memory = _host_memory(traces)
    if memory is not None:
        how["host_memory_bytes"] = "recorded in the traces"
    notes = ["these jobs ran without a GPU: the rates of the link and of updates on a GPU are not known"]
    extra = {"measured": {key: {"how": text} for key, text in how.items()}, "notes": notes}
    return Machine(name=name, host_memory_bytes=memory, **_median_rates(steps_of_traces), extra=extra)


def _about(result: MachineFit, samples: Sequence[FitSample]) -> dict[str, Any]:
    """Return the object `fit` of the machine file."""
    return {
        "policies": {sample.name: sample.policy for sample in samples},
        "ranks": {sample.name: sample.ranks for sample in samples},
        "residuals": {name: round(residual, 4) for name, residual in result.residuals.items()},
        "uncertainty": {key: round(factor, 3) for key, factor in result.uncertainty.items()},
        "unidentified": list(result.unidentified),
    }


def _gpu_memory(traces: Sequence[Trace]) -> float | None:
    sizes = {
        device.capacity_bytes
        for trace in traces
        if (device := first_device(trace, trace.ranks[0])).kind == "cuda" and device.capacity_bytes
    }
    if len(sizes) > 1:
        both = ", ".join(bytes_text(size) for size in sorted(sizes))
        raise MachineError(f"these traces are of GPUs of different size ({both}): fit each machine from its own")
    return next(map(float, sizes), None)


def _host_memory(traces: Sequence[Trace]) -> float | None:
    """Return a rank's share of the host's memory; None if the host's memory was not recorded."""
    shares = []
    for trace in traces:
        capacity = trace.meta.host.cpu.capacity_bytes
        if capacity:
            shares.append(capacity / (ranks_on_host(trace) or 1))
    return min(shares, default=None)
