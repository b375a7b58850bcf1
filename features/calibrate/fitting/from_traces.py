"""Fits a machine to traces of jobs that ran on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import least_squares

from ebbtide.analysis.metrics.devices import first_device
from ebbtide.errors import MachineError
from ebbtide.features.calibrate.fitting.samples import (
    FitSample,
    StepRates,
    sample_of,
    step_rates,
)
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.replay.inputs import ranks_on_host
from ebbtide.machines.accuracy import RATES
from ebbtide.machines.machine import SHARED_RATES, Box, Machine
from ebbtide.profiler.trace import Trace, open_trace
from ebbtide.units import bytes_text

Vector = np.ndarray[Any, Any]
# Copies reach about this share of a link's peak.
_LINK_EFFICIENCY = 0.8
_LINK = ("h2d_bytes_per_s", "d2h_bytes_per_s")
# The start of the search with a slow link, in widths of its prior.
_SLOW_LINK = -2.5
# Names of the same rates of one rank while the others are idle, as in `box` of a
# machine file.
_ONE_RANK = {f"box.one_rank_{key}": key for key in SHARED_RATES}
# Evaluations from each start of the search, then how many of the best are continued,
# and with how many more.
_FIRST_EVALUATIONS = 12
_REFINED_STARTS = 3
_EVALUATIONS = 200
# Models are of different size from this ratio on.
_OTHER_MODEL = 1.3
# Medians of a trace are accurate to about this share, and so is the simulator.
_RELATIVE_ERROR = 0.02
# A rate whose uncertainty is still more than this share of its prior's is determined by
# the prior, not by the traces.
_IDENTIFIED = 0.5


def machine_of(paths: Sequence[Path], name: str) -> Machine:
    """Return the machine that explains these traces best, with the key `fit`.

    Rates that follow from the sub-steps of jobs are not fitted. Raises MachineError
    where a trace does not record its offload, or GPUs differ.
    """
    traces = [open_trace(path) for path in paths]
    steps_of_traces = [step_rates(trace) for trace in traces]
    if any(_on_cpu(trace) for trace in traces):
        return _machine_without_gpu(traces, steps_of_traces, name)
    samples = [
        _sample(trace, steps)
        for trace, steps in zip(traces, steps_of_traces, strict=True)
    ]
    names = [sample.name for sample in samples]
    if len(set(names)) < len(names):
        samples = [
            replace(sample, name=str(path))
            for sample, path in zip(samples, paths, strict=True)
        ]
    measured_rates = _median_rates(steps_of_traces)
    if len({sample.ranks for sample in samples}) > 1:
        # The rate of a kernel differs with the ranks on the host. The fit relates these
        # rates.
        measured_rates.pop("cpu_update_params_per_s", None)
    measured = Machine(
        gpu_memory_bytes=_gpu_memory(traces),
        host_memory_bytes=_host_memory(traces),
        **measured_rates,
    )
    result = fit(samples, measured, name)
    machine = _rounded(result)
    about = {
        **_about(result, samples),
        "rates": {key: getattr(machine, key) for key in sorted(RATES)},
    }
    return replace(machine, extra={"fit": about, "notes": _notes(result, samples)})


def _notes(result: MachineFit, samples: Sequence[FitSample]) -> list[str]:
    """Return what other traces would add, in words."""
    (smallest, *_, largest) = sorted(
        [sample.workload.params * (sample.ranks or 1) for sample in samples] * 2
    )
    if largest > _OTHER_MODEL * smallest:
        return []
    stand = [
        key
        for key in result.uncertainty
        if key not in result.unidentified and not key.startswith("box.")
    ]
    return [
        f"all traces are of models of {smallest / 1e9:.3g} G parameters: "
        f"{', '.join(stand)} stand on one size. Updates "
        "of other sizes are extrapolated, and blocking copies of gradients depend on "
        "it: add traces of another model"
    ]


def _rounded(result: MachineFit) -> Machine:
    """Return the fitted machine with four digits per rate.

    No fit is accurate to more.
    """
    machine, box = result.machine, result.machine.box
    rates: dict[str, Any] = {
        key: _with_four_digits(getattr(machine, key))
        for key in result.uncertainty
        if not key.startswith("box.")
    }
    machine = replace(machine, **rates)
    if box is None:
        return machine
    alone = {
        key: _with_four_digits(rate)
        for key, rate in asdict(box).items()
        if key.startswith("one_rank") and rate
    }
    return replace(machine, box=box_of_ranks(machine, box.ranks, alone))


def _with_four_digits(value: float) -> float:
    return float(f"{value:.4g}")


def _sample(trace: Trace, steps: StepRates | None) -> FitSample:
    """Return the measurements of a trace.

    Passes of DeepSpeed that no plan has are left out.
    """
    sample = sample_of(trace)
    return (
        replace(sample, update_s=sample.update_s - steps.not_in_plans_s)
        if steps is not None
        else sample
    )


def _median_rates(steps_of_traces: Sequence[StepRates | None]) -> dict[str, Any]:
    """Return the median of each rate that follows from sub-steps."""
    rates_of_traces = [steps.rates for steps in steps_of_traces if steps is not None]
    keys = {key for rates in rates_of_traces for key in rates}
    return {
        key: median(rates[key] for rates in rates_of_traces if key in rates)
        for key in keys
    }


def _on_cpu(trace: Trace) -> bool:
    return bool(trace.ranks) and first_device(trace, trace.ranks[0]).kind == "cpu"


def _machine_without_gpu(
    traces: Sequence[Trace], steps_of_traces: Sequence[StepRates | None], name: str
) -> Machine:
    """Return the rates of a machine that jobs without a GPU show by their sub-steps,
    without link and fit."""
    for trace, steps in zip(traces, steps_of_traces, strict=True):
        if not _on_cpu(trace):
            raise MachineError(
                f"{trace.path} ran on a GPU and others did not: fit each machine from "
                "its own"
            )
        if steps is None:
            raise MachineError(
                f"{trace.path} ran without a GPU and has no sub-steps of DeepSpeed's: "
                "measure with `ebbtide calibrate`"
            )
    how = {
        key: text
        for steps in steps_of_traces
        if steps is not None
        for key, text in steps.how.items()
    }
    memory = _host_memory(traces)
    if memory is not None:
        how["host_memory_bytes"] = "recorded in the traces"
    notes = [
        "these jobs ran without a GPU: the rates of the link and of updates on a GPU "
        "are not known"
    ]
    extra = {
        "measured": {key: {"how": text} for key, text in how.items()},
        "notes": notes,
    }
    return Machine(
        name=name,
        host_memory_bytes=memory,
        **_median_rates(steps_of_traces),
        extra=extra,
    )


def _about(result: MachineFit, samples: Sequence[FitSample]) -> dict[str, Any]:
    """Return the object `fit` of the machine file."""
    return {
        "policies": {sample.name: sample.policy.text for sample in samples},
        "ranks": {sample.name: sample.ranks for sample in samples},
        "residuals": {
            name: round(residual, 4) for name, residual in result.residuals.items()
        },
        "uncertainty": {
            key: round(factor, 3) for key, factor in result.uncertainty.items()
        },
        "unidentified": list(result.unidentified),
    }


def _gpu_memory(traces: Sequence[Trace]) -> float | None:
    sizes = {
        device.capacity_bytes
        for trace in traces
        if (device := first_device(trace, trace.ranks[0])).kind == "cuda"
        and device.capacity_bytes
    }
    if len(sizes) > 1:
        both = ", ".join(bytes_text(size) for size in sorted(sizes))
        raise MachineError(
            f"these traces are of GPUs of different size ({both}): fit each machine "
            "from its own"
        )
    return next(map(float, sizes), None)


def _host_memory(traces: Sequence[Trace]) -> float | None:
    """Return a rank's share of the host's memory; None if it was not recorded."""
    shares = []
    for trace in traces:
        capacity = trace.meta.host.cpu.capacity_bytes
        if capacity:
            shares.append(capacity / (ranks_on_host(trace) or 1))
    return min(shares, default=None)


class Prior(NamedTuple):
    """A prior of a quantity, normal in the logarithm."""

    value: float
    factor: float  # The factor within which it is with a probability of two in three.


# Priors of a rank's rates. They are wide, so that data outweigh them, and settle only
# what data cannot.
PRIORS: dict[str, Prior] = {
    "cpu_update_params_per_s": Prior(2e9, 3.0),
    "host_memory_bytes_per_s": Prior(90e9, 2.0),
    "h2d_bytes_per_s": Prior(40e9, 1.6),
    "d2h_bytes_per_s": Prior(40e9, 1.6),
    "h2d_pageable_bytes_per_s": Prior(12e9, 3.0),
    "d2h_pageable_bytes_per_s": Prior(4e9, 3.0),
    "cpu_cast_params_per_s": Prior(8e9, 3.0),
    "gpu_update_params_per_s": Prior(30e9, 2.0),
    "step_overhead_s": Prior(0.03, 3.0),
    "operation_s": Prior(1e-4, 3.0),
}
# Recorded overheads of a step on one host are within about this factor of their median.
_MEASURED_OVERHEAD_FACTOR = 1.3
# The CPU's share of the memory bandwidth in an update, a pass over memory: a good
# kernel reaches it by itself.
MEMORY_SHARE_PRIOR = Prior(0.85, 1.2)


@dataclass(frozen=True)
class MachineFit:
    """A fitted machine, and how well it explains the traces."""

    machine: Machine
    residuals: dict[str, float]  # Predicted over measured update, minus 1, by trace.
    # The factor within which each rate is known (one standard error);
    # `box.one_rank_...`: while others are idle.
    uncertainty: dict[str, float]
    # Rates that these traces do not determine; their values are the priors.
    unidentified: tuple[str, ...]


def fit(
    samples: Sequence[FitSample], measured: Machine | None = None, name: str = "fitted"
) -> MachineFit:
    """Fit a machine: the maximum a posteriori.

    Errors are normal in the logarithm.

    Minimises the squared relative errors of the updates (and of backwards that waited
    for gradients), over 2 %, plus the squared distances from the priors, over their
    widths; the covariance is the inverse of J'J. Rates are those with the most ranks on
    a host; samples with several numbers also give the rates of a rank alone. Raises
    MachineError."""
    if not samples:
        raise MachineError("a machine cannot be fitted from no trace")
    base = measured or Machine()
    keys = [key for key in PRIORS if getattr(base, key) is None]
    box_ranks, several = _ranks_of(samples)
    names = [
        *keys,
        *(name for name, key in _ONE_RANK.items() if several and key in keys),
    ]
    priors = _priors_of(samples)
    center = np.log([priors[_ONE_RANK.get(name, name)].value for name in names])
    width = np.log([priors[_ONE_RANK.get(name, name)].factor for name in names])

    def machine_at(log_rates: Vector) -> Machine:
        rates: dict[str, Any] = dict(
            zip(names, map(float, np.exp(log_rates)), strict=True)
        )
        own = replace(base, name=name, **{key: rates[key] for key in keys})
        alone = {
            name.removeprefix("box."): rates[name]
            for name in names
            if name in _ONE_RANK
        }
        return replace(own, box=box_of_ranks(own, box_ranks, alone))

    def errors(log_rates: Vector) -> Vector:
        machine = machine_at(log_rates)
        relative = []
        for sample in samples:
            schedule = sample.simulate(machine)
            relative.append(
                np.log(schedule.update_s / sample.update_s) / _RELATIVE_ERROR
            )
            if sample.backward_s is not None:
                relative.append(
                    np.log(schedule.backward_s / sample.backward_s) / _RELATIVE_ERROR
                )
        memory_shares = [
            _memory_share_error(shared, samples[0].workload)
            for shared in ((machine, machine.for_ranks(1)) if several else (machine,))
        ]
        return np.concatenate([relative, (log_rates - center) / width, memory_shares])

    # The errors have kinks where another rate that ranks share starts to limit. A
    # coarse difference looks across them, and several starting points keep the search
    # from staying where it began.
    limiting = [name for name in names if _ONE_RANK.get(name, name) in SHARED_RATES]
    offsets = [(name, sign) for name in limiting for sign in (-1.0, 1.0)]
    # A link limits nothing near its prior, so only a start far below it shows what a
    # slow link would explain.
    offsets += [(name, _SLOW_LINK) for name in _LINK if name in names]
    starts = [
        center + offset * width * (np.array(names) == name) for name, offset in offsets
    ]

    def search(start: Vector, evaluations: int) -> Any:
        return least_squares(
            errors,
            start,
            diff_step=1e-3,
            x_scale=width,
            method="trf",
            max_nfev=evaluations,
        )

    def cost(solution: Any) -> float:
        return float(solution.cost)

    first = sorted(
        (search(start, _FIRST_EVALUATIONS) for start in (center, *starts)), key=cost
    )
    best = min(
        (search(solution.x, _EVALUATIONS) for solution in first[:_REFINED_STARTS]),
        key=cost,
    )
    sigmas = np.sqrt(np.diag(np.linalg.inv(best.jac.T @ best.jac)))
    unidentified = [
        name
        for name, sigma in zip(names, sigmas, strict=True)
        if sigma > _IDENTIFIED * np.log(PRIORS[_ONE_RANK.get(name, name)].factor)
    ]
    machine = machine_at(best.x)
    return MachineFit(
        machine=machine,
        residuals={
            sample.name: sample.simulate(machine).update_s / sample.update_s - 1
            for sample in samples
        },
        uncertainty={
            name: float(np.exp(sigma))
            for name, sigma in zip(names, sigmas, strict=True)
        },
        unidentified=tuple(unidentified),
    )


def _ranks_of(samples: Sequence[FitSample]) -> tuple[int, bool]:
    """Return the largest number of ranks on a host.

    Return also whether there are several numbers.
    """
    numbers = {sample.ranks for sample in samples}
    if None in numbers and len(numbers) > 1:
        unknown = next(sample.name for sample in samples if sample.ranks is None)
        raise MachineError(
            f"{unknown} does not have all ranks of its job, so it is not known how "
            "many shared its host: fit it alone"
        )
    return max((ranks for ranks in numbers if ranks is not None), default=1), len(
        numbers
    ) > 1


def box_of_ranks(machine: Machine, ranks: int, alone: dict[str, float]) -> Box | None:
    """Return the totals of a box from the rates of one rank while all ranks update, and
    of one alone; None for one rank."""
    if ranks == 1:
        return None
    totals = {
        key: None if (rate := getattr(machine, key)) is None else ranks * rate
        for key in SHARED_RATES
    }
    return Box(ranks, **totals, **alone)


def _priors_of(samples: Sequence[FitSample]) -> dict[str, Prior]:
    """Return the priors of all rates.

    The priors of the link follow from its peak, those for the overhead from steps that
    tell it.
    """
    priors = dict(PRIORS)
    if link_peak := next(
        (sample.link_peak for sample in samples if sample.link_peak), None
    ):
        priors |= {
            key: Prior(_LINK_EFFICIENCY * link_peak, PRIORS[key].factor)
            for key in _LINK
        }
    if overheads := [sample.overhead_s for sample in samples if sample.overhead_s]:
        priors["step_overhead_s"] = Prior(median(overheads), _MEASURED_OVERHEAD_FACTOR)
    return priors


def _memory_share_error(machine: Machine, workload: Workload) -> float:
    """Return how far the CPU's share of the memory bandwidth is from its prior.

    The unit is the prior's width.
    """
    assert machine.cpu_update_params_per_s is not None
    assert machine.host_memory_bytes_per_s is not None
    share = (
        workload.cpu_update_bytes
        * machine.cpu_update_params_per_s
        / machine.host_memory_bytes_per_s
    )
    return float(
        np.log(share / MEMORY_SHARE_PRIOR.value) / np.log(MEMORY_SHARE_PRIOR.factor)
    )
