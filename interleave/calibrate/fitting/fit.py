"""Fits a machine to traces whose offload configuration is known: least squares of the simulator's predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import least_squares

from ebbtide.errors import MachineError
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies import make_plan
from ebbtide.interleave.replay.recorded_policy import recorded_policy
from ebbtide.interleave.replay.workload_from_trace import workload_of
from ebbtide.interleave.simulation.simulator import simulate
from ebbtide.machines.machine import Machine
from ebbtide.phases import BACKWARD, UPDATE
from ebbtide.profiler.trace import Trace

Vector = np.ndarray[Any, Any]


class Prior(NamedTuple):
    """A prior of a quantity, normal in the logarithm.

    Attributes:
        value: The most likely value.
        factor: The factor within which it is with a probability of two in three.
    """

    value: float
    factor: float


# Priors of a rank's rates. They are wide, so that data outweigh them, and settle only what data cannot.
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
}
# An update on the CPU is a pass over memory. The prior of its share of the memory bandwidth, which a good kernel
# reaches by itself (docs/performance.md), is narrow.
MEMORY_SHARE_PRIOR = Prior(0.85, 1.2)
# Copies reach about this share of a link's peak.
_LINK_EFFICIENCY = 0.8
# The rates that limit updates. Where another one starts to limit, the residuals have a kink.
_LIMITING = ("cpu_update_params_per_s", "host_memory_bytes_per_s")
# Medians of a trace are accurate to about this share, and so is the simulator.
_RELATIVE_ERROR = 0.02
# A rate whose uncertainty is still more than this share of its prior's is determined by the prior, not by the traces.
_IDENTIFIED = 0.5


@dataclass(frozen=True)
class FitSample:
    """The measurements of one trace for a fit.

    Attributes:
        name: Name of the trace.
        workload: Its workload.
        policy: The policy it ran under.
        update_s: Measured update, seconds.
        backward_s: Measured backward, seconds, if it waited for gradients; otherwise None.
        link_peak: Peak rate of the link, bytes/s, None if not recorded.
    """

    name: str
    workload: Workload
    policy: str
    update_s: float
    backward_s: float | None
    link_peak: float | None = None


@dataclass(frozen=True)
class MachineFit:
    """A fitted machine, and how well it explains the traces.

    Attributes:
        machine: The machine.
        residuals: Predicted over measured update, minus 1, by trace.
        uncertainty: The factor within which each rate is known (one standard error).
        unidentified: Rates that these traces do not determine; their values are those of the priors.
    """

    machine: Machine
    residuals: dict[str, float]
    uncertainty: dict[str, float]
    unidentified: tuple[str, ...]


def sample_of(trace: Trace) -> FitSample:
    """Return the measurements of a trace.

    Raises:
        MachineError: The trace's policy is not known.
    """
    policy = recorded_policy(trace)
    if policy is None:
        raise MachineError(
            f"{trace.path} does not record how it was offloaded (a DeepSpeed configuration with offload_optimizer does)"
        )
    from ebbtide.analysis.metrics.trace_metrics import TraceMetrics

    metrics = TraceMetrics(trace)
    update_ms, backward_ms = metrics.phase_ms(UPDATE), metrics.phase_ms(BACKWARD)
    backward_waits = policy.endswith("grads=blocking") and backward_ms is not None
    return FitSample(
        trace.name,
        workload_of(trace),
        policy,
        (update_ms or 0.0) / 1e3,
        (backward_ms or 0.0) / 1e3 if backward_waits else None,
        metrics.peak_bytes_per_s,
    )


def fit(samples: Sequence[FitSample], measured: Machine | None = None, name: str = "fitted") -> MachineFit:
    """Fit a machine: the maximum a posteriori for errors that are normal in the logarithm.

    Minimises the squared relative errors of the updates (and of backwards that waited for gradients), over 2 %, plus
    the squared distances from the priors, over their widths. The covariance is the inverse of J'J.

    Args:
        samples: The measurements.
        measured: Rates that were measured otherwise and are not fitted.
        name: Name of the machine.

    Raises:
        MachineError: There is no sample.
    """
    if not samples:
        raise MachineError("a machine cannot be fitted from no trace")
    base = measured or Machine()
    keys = [key for key in PRIORS if getattr(base, key) is None]
    link_peak = next((sample.link_peak for sample in samples if sample.link_peak), None)
    center = np.log([_prior_value(key, link_peak) for key in keys])
    width = np.log([PRIORS[key].factor for key in keys])

    def machine_at(log_rates: Vector) -> Machine:
        rates: dict[str, Any] = dict(zip(keys, map(float, np.exp(log_rates)), strict=True))
        return replace(base, name=name, **rates)

    def errors(log_rates: Vector) -> Vector:
        machine = machine_at(log_rates)
        relative = []
        for sample in samples:
            schedule = simulate(make_plan(sample.policy, sample.workload, machine), sample.workload, machine)
            relative.append(np.log(schedule.update_s / sample.update_s) / _RELATIVE_ERROR)
            if sample.backward_s is not None:
                relative.append(np.log(schedule.backward_s / sample.backward_s) / _RELATIVE_ERROR)
        memory_share = _memory_share_error(machine, samples[0].workload)
        return np.concatenate([relative, (log_rates - center) / width, [memory_share]])

    # The errors have kinks where another rate starts to limit. A coarse difference looks across them, and several
    # starting points keep the search from staying where it began.
    starts = [center + sign * width * (np.array(keys) == key) for key in _LIMITING for sign in (-1, 1)]
    solutions = [
        least_squares(errors, start, diff_step=1e-3, x_scale=width, method="trf", max_nfev=200)
        for start in (center, *starts)
    ]
    best = min(solutions, key=lambda solution: float(solution.cost))
    sigmas = np.sqrt(np.diag(np.linalg.inv(best.jac.T @ best.jac)))
    machine = machine_at(best.x)
    residuals = {}
    for sample in samples:
        schedule = simulate(make_plan(sample.policy, sample.workload, machine), sample.workload, machine)
        residuals[sample.name] = schedule.update_s / sample.update_s - 1
    return MachineFit(
        machine=machine,
        residuals=residuals,
        uncertainty={key: float(np.exp(sigma)) for key, sigma in zip(keys, sigmas, strict=True)},
        unidentified=tuple(
            key
            for key, sigma, prior_sigma in zip(keys, sigmas, width, strict=True)
            if sigma > _IDENTIFIED * prior_sigma
        ),
    )


def _prior_value(key: str, link_peak: float | None) -> float:
    """Return the most likely value of a rate before any update is looked at."""
    if link_peak and key in ("h2d_bytes_per_s", "d2h_bytes_per_s"):
        return _LINK_EFFICIENCY * link_peak
    return PRIORS[key].value


def _memory_share_error(machine: Machine, workload: Workload) -> float:
    """Return how far the CPU's share of the memory bandwidth is from its prior, over the prior's width."""
    assert machine.cpu_update_params_per_s is not None
    assert machine.host_memory_bytes_per_s is not None
    share = workload.cpu_update_bytes * machine.cpu_update_params_per_s / machine.host_memory_bytes_per_s
    return float(np.log(share / MEMORY_SHARE_PRIOR.value) / np.log(MEMORY_SHARE_PRIOR.factor))
