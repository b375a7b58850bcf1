"""The gain of each mechanism by itself, on the way from ZeRO-Offload to the adaptive policy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from ebbtide.errors import MachineError, PolicyError
from ebbtide.interleave.model.plan import Plan
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies import make_plan
from ebbtide.interleave.simulation.steps import simulate_steps
from ebbtide.machines.machine import Machine


@dataclass(frozen=True)
class AblationStep:
    """A mechanism, added to those before it.

    Attributes:
        mechanism: The mechanism in words.
        policy: The policy's string that has it.
        iteration_ms: Iteration time with it.
        gain_ms: Iteration time saved by adding it.
    """

    mechanism: str
    policy: str
    iteration_ms: float
    gain_ms: float


class _Rung(NamedTuple):
    mechanism: str
    policy: str
    workload: Workload


def explain(workload: Workload, machine: Machine) -> list[AblationStep]:
    """Add one mechanism at a time, from ZeRO-Offload with blocking gradients to the adaptive policy with overlap.

    Mechanisms that need a rate or a property of the workload that is not known are left out. Where state is in storage
    the last step is what enough host memory would gain.
    """
    steps: list[AblationStep] = []
    plan: Plan | None = None

    def add(rung: _Rung, rates: Machine) -> None:
        nonlocal plan
        try:
            plan = make_plan(rung.policy, rung.workload, rates)
            iteration_ms = simulate_steps(plan, rung.workload, rates).mean("iteration_s") * 1e3
        except (MachineError, PolicyError):
            return
        gain_ms = steps[-1].iteration_ms - iteration_ms if steps else 0.0
        steps.append(AblationStep(rung.mechanism, rung.policy, iteration_ms, gain_ms))

    for rung in _ladder(workload):
        add(rung, machine)
    if plan is not None and plan.stored:
        in_memory = replace(workload, host_free_bytes=None)
        mechanism = "host memory for all state, instead of storage"
        add(_Rung(mechanism, steps[-1].policy, in_memory), replace(machine, host_memory_bytes=None))
    return steps


def _ladder(workload: Workload) -> Iterator[_Rung]:
    yield _Rung("ZeRO-Offload with blocking gradients", "zero-offload,grads=blocking", workload)
    yield _Rung("asynchronous gradients", "zero-offload", workload)
    yield _Rung("pipelined conversions and copies", "pipelined", workload)
    yield _Rung("interleaving, every second subgroup on the GPU", "interleaved:2", workload)
    min_free = workload.min_free_bytes
    if min_free is None:
        return
    without_windows = replace(workload, gpu_free=((0.0, min_free),))
    yield _Rung("shares and residents from the rates, in memory that is always free", "adaptive", without_windows)
    if len(workload.gpu_free or ()) > 1:
        yield _Rung("windows: state parked in memory that is free for a while", "adaptive", workload)
    yield _Rung("late updates, under the next forward", "adaptive,overlap=forward", workload)
    if workload.clipping and not workload.gradients_held_until_step:
        yield _Rung("speculative updates, inside the backward", "adaptive,overlap=both", workload)
