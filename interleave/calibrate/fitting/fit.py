"""Machines fitted from traces whose offload configuration is known: least squares of the simulator itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from ebbtide.errors import MachineError
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies import make_plan
from ebbtide.interleave.replay.workload_from_trace import recorded_policy, workload_of
from ebbtide.interleave.simulation.simulator import simulate
from ebbtide.machines.machine import Machine
from ebbtide.profiler.trace import Trace

# What is believed of a rank's rates before its traces are looked at: a value, and the factor within which it lies with
# two chances in three. Wide, so that data outweigh them; they only settle what data cannot. (`_OF_MEMORY` is not.)
_BELIEFS: dict[str, tuple[float, float]] = {
    "cpu_update_params_per_s": (2e9, 3.0),
    "host_memory_bytes_per_s": (90e9, 2.0),
    "h2d_bytes_per_s": (40e9, 1.6),
    "d2h_bytes_per_s": (40e9, 1.6),
    "h2d_pageable_bytes_per_s": (12e9, 3.0),
    "d2h_pageable_bytes_per_s": (4e9, 3.0),
    "cpu_cast_params_per_s": (8e9, 3.0),
    "gpu_update_params_per_s": (30e9, 2.0),
    "step_overhead_s": (0.03, 3.0),
}
# An update on the CPU is a pass over memory: of its bandwidth the rate takes so much, as a good kernel does by itself
# (docs/performance.md), within such a factor.
_OF_MEMORY = (0.85, 1.2)
# What binds an update, and so turns its slope.
_TURNING = ("cpu_update_params_per_s", "host_memory_bytes_per_s")
# Medians of a trace are good to about this share, and so is the simulator.
_SIGMA = 0.02
# A rate whose uncertainty the traces have not at least halved is the belief's, not theirs.
_IDENTIFIED = 0.5


@dataclass(frozen=True)
class Sample:
    """One trace's part of a fit. Measured: seconds; backward_s only where it waited for gradients."""

    name: str
    workload: Workload
    policy: str
    update_s: float
    backward_s: float | None
    link_peak: float | None = None


@dataclass(frozen=True)
class Fit:
    """The machine, and how well it explains the traces. residuals: predicted over measured update, less 1, by trace.
    uncertainty: the factor within which each rate lies (one standard error). unidentified: rates that these traces do
    not tell; their values are beliefs."""

    machine: Machine
    residuals: dict[str, float]
    uncertainty: dict[str, float]
    unidentified: tuple[str, ...]


def sample_of(trace: Trace) -> Sample:
    """What a trace tells of the machine that it ran on. Raises MachineError where its policy is not known."""
    policy = recorded_policy(trace)
    if policy is None:
        raise MachineError(
            f"{trace.path} does not tell how it was offloaded (a DeepSpeed configuration with offload_optimizer does)"
        )
    from ebbtide.analysis.metrics.trace_metrics import Study

    study = Study(trace)
    update, backward = study.ms("update"), study.ms("backward")
    waits = policy.endswith("grads=blocking") and backward is not None
    return Sample(
        trace.name,
        workload_of(trace),
        policy,
        (update or 0.0) / 1e3,
        (backward or 0.0) / 1e3 if waits else None,
        study.peak_bytes_per_s,
    )


def _believed(key: str, peak: float | None) -> float:
    """Copies reach about 0.8 of a link's peak, where that is known."""
    return 0.8 * peak if peak and key in ("h2d_bytes_per_s", "d2h_bytes_per_s") else _BELIEFS[key][0]


def _of_memory(box: Machine, workload: Workload) -> list[float]:
    """How far the CPU's rate is from what its memory lets it do, over the belief's width."""
    assert box.cpu_update_params_per_s is not None
    assert box.host_memory_bytes_per_s is not None
    share = workload.cpu_update_bytes * box.cpu_update_params_per_s / box.host_memory_bytes_per_s
    return [float(np.log(share / _OF_MEMORY[0]) / np.log(_OF_MEMORY[1]))]


def fit(samples: Sequence[Sample], known: Machine | None = None, name: str = "fitted") -> Fit:
    """Fit a machine. known: rates that were measured otherwise and stay as they are. Raises MachineError for no sample.

    Minimises the squared relative errors of the updates (and of backwards that waited for gradients), over 2 %, plus
    the squared distances from what is believed, over its width: the maximum a posteriori for errors that are normal
    in the logarithm. Its covariance is the inverse of J'J."""
    if not samples:
        raise MachineError("a machine cannot be fitted from no trace")
    base = known or Machine()
    free = [key for key in _BELIEFS if getattr(base, key) is None]
    peak = next((sample.link_peak for sample in samples if sample.link_peak), None)
    center = np.log([_believed(key, peak) for key in free])
    width = np.log([_BELIEFS[key][1] for key in free])

    def machine(at: np.ndarray[Any, Any]) -> Machine:
        rates: dict[str, Any] = dict(zip(free, map(float, np.exp(at)), strict=True))
        return replace(base, name=name, **rates)

    def errors(at: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        box = machine(at)
        found = []
        for sample in samples:
            schedule = simulate(make_plan(sample.policy, sample.workload, box), sample.workload, box)
            found.append(np.log(schedule.update_s / sample.update_s) / _SIGMA)
            if sample.backward_s is not None:
                found.append(np.log(schedule.backward_s / sample.backward_s) / _SIGMA)
        return np.concatenate([found, (at - center) / width, _of_memory(box, samples[0].workload)])

    # The simulator has kinks where what binds changes: a coarse difference looks across them, and several beginnings
    # keep the search from staying where it began.
    begins = [center + place * width * (np.array(free) == key) for key in _TURNING for place in (-1, 1)]
    tries = [
        least_squares(errors, begin, diff_step=1e-3, x_scale=width, method="trf", max_nfev=200)
        for begin in (center, *begins)
    ]
    best = min(tries, key=lambda found: float(found.cost))
    covariance = np.linalg.inv(best.jac.T @ best.jac)
    sigma = np.sqrt(np.diag(covariance))
    box = machine(best.x)
    residuals = {}
    for sample in samples:
        schedule = simulate(make_plan(sample.policy, sample.workload, box), sample.workload, box)
        residuals[sample.name] = schedule.update_s / sample.update_s - 1
    return Fit(
        machine=box,
        residuals=residuals,
        uncertainty={key: float(np.exp(s)) for key, s in zip(free, sigma, strict=True)},
        unidentified=tuple(key for key, s, w in zip(free, sigma, width, strict=True) if s > _IDENTIFIED * w),
    )
