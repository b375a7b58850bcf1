"""Rates of a machine that follow directly from the sub-steps of a recorded DeepSpeed job."""

from __future__ import annotations

from dataclasses import dataclass

from ebbtide.analysis.metrics.trace_metrics import TraceMetrics
from ebbtide.profiler.trace import Trace

# Sub-steps whose time does not depend on the number of parameters.
_OVERHEAD = ("overflow check", "gradient norm", "gather", "rest")
# Sub-steps of each subgroup on the host that the simulator's plans have no operation for.
_NOT_IN_PLANS = ("prepare", "unscale", "release")


@dataclass(frozen=True)
class StepRates:
    """Rates from sub-steps.

    Attributes:
        rates: Rates by the keys of a machine file.
        how: How each rate was measured.
        not_in_plans_s: Seconds per step on the host in passes that no plan has.
    """

    rates: dict[str, float]
    how: dict[str, str]
    not_in_plans_s: float


def step_rates(trace: Trace) -> StepRates | None:
    """Return the rates that follow from the sub-steps of a trace.

    DeepSpeed's kernel updates fp32 state alone: its rate is that of `update`. `parameters` converts, and on a GPU also
    copies. The part of it that is not a pageable copy is the conversion.

    Returns:
        None if the trace has no update on the CPU.
    """
    metrics = TraceMetrics(trace)
    update, parameters = metrics.sub_step("update", ("cpu",)), metrics.sub_step("parameters")
    on_cpu = _params_on_cpu(metrics)
    if update is None or not update.median_ms or on_cpu is None:
        return None
    result = StepRates({}, {}, _seconds(metrics, _NOT_IN_PLANS))

    def add(key: str, value: float, how: str) -> None:
        result.rates[key], result.how[key] = float(f"{value:.4g}"), how

    add("cpu_update_params_per_s", on_cpu / update.median_ms * 1e3, "DeepSpeed's kernel, median of its steps")
    add("step_overhead_s", _seconds(metrics, _OVERHEAD), "checks, norm, gather and rest of DeepSpeed's step")
    job = metrics.deepspeed
    # With resident subgroups it is not known how much of the time is theirs.
    if parameters is not None and parameters.median_ms and job is not None and job.cpu_share == 1:
        copy_share = parameters.h2d.busy_share if metrics.has_gpu else 0.0
        if copy_share is not None and copy_share < 1:
            converting_ms = parameters.median_ms * (1 - copy_share)
            add("cpu_cast_params_per_s", on_cpu / converting_ms * 1e3, "DeepSpeed's fp32 to half precision")
        if metrics.has_gpu and parameters.h2d.pageable_share and parameters.h2d.busy_bytes_per_s:
            add("h2d_pageable_bytes_per_s", parameters.h2d.busy_bytes_per_s, "pageable copies of parameters")
    return result


def _params_on_cpu(metrics: TraceMetrics) -> float | None:
    job = metrics.deepspeed
    if job is None:
        return None
    params = sum(job.subgroups) or metrics.params
    return params * job.cpu_share if params else None


def _seconds(metrics: TraceMetrics, names: tuple[str, ...]) -> float:
    steps = [metrics.sub_step(name) for name in names]
    return sum(step.median_ms for step in steps if step is not None) / 1e3
