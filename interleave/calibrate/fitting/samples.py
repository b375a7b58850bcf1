"""Measurements of traces, for a fit."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ebbtide.errors import MachineError
from ebbtide.interleave.model.plan import Plan
from ebbtide.interleave.model.schedule import Schedule
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies import make_plan
from ebbtide.interleave.replay.recorded_policy import recorded_policy
from ebbtide.interleave.replay.workload_from_trace import ranks_on_host, workload_of
from ebbtide.interleave.simulation.simulator import simulate
from ebbtide.machines.machine import Machine
from ebbtide.phases import BACKWARD, UPDATE
from ebbtide.profiler.trace import Trace


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
        ranks: Ranks that shared the host; None: not known.
    """

    name: str
    workload: Workload
    policy: str
    update_s: float
    backward_s: float | None
    link_peak: float | None = None
    ranks: int | None = 1

    def simulate(self, machine: Machine) -> Schedule:
        """Return the schedule on a machine, with the rates of as many ranks on a host as the trace had."""
        shared = machine.for_ranks(self.ranks) if machine.box is not None and self.ranks is not None else machine
        return simulate(self._plan, self.workload, shared)

    @cached_property
    def _plan(self) -> Plan:
        # A fit simulates it thousands of times. It needs no rates: `sample_of` refuses policies that do.
        return make_plan(self.policy, self.workload, Machine())


def sample_of(trace: Trace) -> FitSample:
    """Return the measurements of a trace.

    Raises:
        MachineError: The trace's policy is not known, or its plan depends on the machine.
    """
    policy = recorded_policy(trace)
    if policy is None:
        raise MachineError(
            f"{trace.path} does not record how it was offloaded (a DeepSpeed configuration with offload_optimizer does)"
        )
    if policy.partition(",")[0] == "adaptive":
        raise MachineError(
            f"{trace.path} ran under adaptive, whose plan follows the machine: fit from a run of another policy"
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
        ranks_on_host(trace),
    )
