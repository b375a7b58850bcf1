"""Rates of a machine that the sub-steps of a recorded DeepSpeed job tell by themselves."""

from __future__ import annotations

from dataclasses import dataclass

from ebbtide.analysis.metrics.trace_metrics import Study
from ebbtide.profiler.trace import Trace

# Of a step, whatever its size.
_OVERHEAD = ("overflow check", "gradient norm", "gather", "rest")
# Of each subgroup, on the host: what the simulator's plans have no operation for.
_BESIDE = ("prepare", "unscale", "release")


@dataclass(frozen=True)
class StepRates:
    """rates: by the keys of a machine file; how: how each was found. beside_s: what a step spends on the host on passes
    that no plan has."""

    rates: dict[str, float]
    how: dict[str, str]
    beside_s: float


def step_rates(trace: Trace) -> StepRates | None:
    """What the sub-steps of a trace tell; None where none is an update on the CPU.

    DeepSpeed's kernel updates fp32 state alone: its rate is that of `update`. `parameters` converts, which in a job
    without a GPU is all that it does; with one it also copies, and what of it is no pageable copy is the conversion.
    """
    study = Study(trace)
    update, parameters = study.sub_step("update", ("cpu",)), study.sub_step("parameters")
    on_cpu = _params_on_cpu(study)
    if update is None or not update.median_ms or on_cpu is None:
        return None
    found = StepRates({}, {}, _seconds(study, _BESIDE))

    def told(key: str, value: float, how: str) -> None:
        found.rates[key], found.how[key] = float(f"{value:.4g}"), how

    told("cpu_update_params_per_s", on_cpu / update.median_ms * 1e3, "DeepSpeed's kernel, median of its steps")
    told("step_overhead_s", _seconds(study, _OVERHEAD), "checks, norm, gather and rest of DeepSpeed's step")
    job = study.deepspeed
    # Beside a resident part it is not known whose time is whose.
    if parameters is not None and parameters.median_ms and job is not None and job.cpu_share == 1:
        copied = parameters.h2d.busy_share if study.has_gpu else 0.0
        if copied is not None and copied < 1:
            converting = parameters.median_ms * (1 - copied)
            told("cpu_cast_params_per_s", on_cpu / converting * 1e3, "DeepSpeed's fp32 to half precision")
        if study.has_gpu and parameters.h2d.pageable_share and parameters.h2d.busy_bytes_per_s:
            told("h2d_pageable_bytes_per_s", parameters.h2d.busy_bytes_per_s, "pageable copies of parameters")
    return found


def _params_on_cpu(study: Study) -> float | None:
    job = study.deepspeed
    if job is None:
        return None
    whole = sum(job.subgroups) or study.params
    return whole * job.cpu_share if whole else None


def _seconds(study: Study, names: tuple[str, ...]) -> float:
    steps = [study.sub_step(name) for name in names]
    return sum(step.median_ms for step in steps if step is not None) / 1e3
