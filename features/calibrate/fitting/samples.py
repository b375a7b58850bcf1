"""Measurements of traces for a fit: samples, and rates that follow from the sub-steps
of recorded DeepSpeed jobs."""

from dataclasses import dataclass
from functools import cached_property

from ebbtide.analysis.metrics.job import JobMetrics
from ebbtide.errors import MachineError
from ebbtide.interleave.model.plan import Plan
from ebbtide.interleave.model.schedule import Schedule
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies import Policy, as_policy
from ebbtide.interleave.replay.inputs import ranks_on_host
from ebbtide.interleave.replay.recorded_job import recorded_policy
from ebbtide.interleave.replay.workload_from_trace import workload_of
from ebbtide.interleave.simulation.simulator import simulate
from ebbtide.machines.machine import Machine
from ebbtide.phases import BACKWARD, UPDATE
from ebbtide.profiler.trace import Trace


@dataclass(frozen=True)
class FitSample:
    """The measurements of one trace for a fit."""

    name: str
    workload: Workload
    policy: Policy
    update_s: float
    # Measured backward, seconds, if it waited for gradients; otherwise None.
    backward_s: float | None
    # Peak rate of the link, bytes/s, None if not recorded.
    link_peak: float | None = None
    ranks: int | None = 1  # Ranks that shared the host; None: not known.
    # The part of the update outside of DeepSpeed's loop over subgroups, seconds; None:
    # not recorded.
    overhead_s: float | None = None

    def simulate(self, machine: Machine) -> Schedule:
        """Return the schedule on a machine.

        The machine has the rates of as many ranks on a host as the trace had.
        """
        shared = (
            machine.for_ranks(self.ranks)
            if machine.box is not None and self.ranks is not None
            else machine
        )
        return simulate(self._plan, self.workload, shared)

    @cached_property
    def _plan(self) -> Plan:
        # A fit simulates it thousands of times. It needs no rates: `sample_of` refuses
        # policies that do.
        return self.policy.plan(self.workload, Machine())


def sample_of(trace: Trace) -> FitSample:
    """Return the measurements of a trace. Raises MachineError where its policy is not
    known or follows the machine."""
    recorded = recorded_policy(trace)
    if recorded is None:
        raise MachineError(
            f"{trace.path} does not record how it was offloaded (a DeepSpeed "
            "configuration with offload_optimizer does)"
        )
    policy = as_policy(recorded)
    if policy.is_adaptive:
        raise MachineError(
            f"{trace.path} ran under adaptive, whose plan follows the machine: fit "
            "from a run of another policy"
        )
    metrics = JobMetrics(trace)
    update_ms, backward_ms = metrics.phase_ms(UPDATE), metrics.phase_ms(BACKWARD)
    loop = metrics.sub_step("optimizer_step")
    loop_ms = loop.median_ms if loop is not None else None
    backward_waits = (
        policy.options.get("grads") == "blocking" and backward_ms is not None
    )
    return FitSample(
        trace.name,
        workload_of(trace),
        policy,
        (update_ms or 0.0) / 1e3,
        (backward_ms or 0.0) / 1e3 if backward_waits else None,
        metrics.peak_bytes_per_s,
        ranks_on_host(trace),
        max(0.0, update_ms - loop_ms) / 1e3 if update_ms and loop_ms else None,
    )


# Sub-steps whose time does not depend on the number of parameters.
_OVERHEAD = ("overflow check", "gradient norm", "gather", "rest")
# Sub-steps of each subgroup on the host that the simulator's plans have no operation
# for.
_NOT_IN_PLANS = ("prepare", "unscale", "release")


@dataclass(frozen=True)
class StepRates:
    """Rates from sub-steps."""

    rates: dict[str, float]
    how: dict[str, str]
    not_in_plans_s: float  # Seconds per step on the host in passes that no plan has.


def step_rates(trace: Trace) -> StepRates | None:
    """Return the rates that follow from the sub-steps of a trace.

    DeepSpeed's kernel updates fp32 state alone in `update`; `parameters` converts, and
    on a GPU also makes a pageable copy. None without an update on the CPU.
    """
    metrics = JobMetrics(trace)
    update, parameters = (
        metrics.sub_step("update", ("cpu",)),
        metrics.sub_step("parameters"),
    )
    on_cpu = _params_on_cpu(metrics)
    if update is None or not update.median_ms or on_cpu is None:
        return None
    result = StepRates({}, {}, _seconds(metrics, _NOT_IN_PLANS))

    def add(key: str, value: float, how: str) -> None:
        result.rates[key], result.how[key] = float(f"{value:.4g}"), how

    add(
        "cpu_update_params_per_s",
        on_cpu / update.median_ms * 1e3,
        "DeepSpeed's kernel, median of its steps",
    )
    add(
        "step_overhead_s",
        _seconds(metrics, _OVERHEAD),
        "checks, norm, gather and rest of DeepSpeed's step",
    )
    setup = metrics.setup
    # With resident subgroups it is not known how much of the time is theirs.
    if (
        parameters is not None
        and parameters.median_ms
        and setup is not None
        and setup.cpu_share == 1
    ):
        copy_share = parameters.h2d.busy_share if metrics.has_gpu else 0.0
        if copy_share is not None and copy_share < 1:
            converting_ms = parameters.median_ms * (1 - copy_share)
            add(
                "cpu_cast_params_per_s",
                on_cpu / converting_ms * 1e3,
                "DeepSpeed's fp32 to half precision",
            )
        if (
            metrics.has_gpu
            and parameters.h2d.pageable_share
            and parameters.h2d.busy_bytes_per_s
        ):
            add(
                "h2d_pageable_bytes_per_s",
                parameters.h2d.busy_bytes_per_s,
                "pageable copies of parameters",
            )
    return result


def _params_on_cpu(metrics: JobMetrics) -> float | None:
    setup = metrics.setup
    if setup is None:
        return None
    params = sum(setup.subgroups) or metrics.params
    return params * setup.cpu_share if params else None


def _seconds(metrics: JobMetrics, names: tuple[str, ...]) -> float:
    steps = [metrics.sub_step(name) for name in names]
    return sum(step.median_ms for step in steps if step is not None) / 1e3
