"""The range of an iteration, from the uncertainty of rates and of the compute."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from ebbtide.interleave.simulation.simulator import Steps, simulate_steps
from ebbtide.json_files import section
from ebbtide.machines.accuracy import accuracy_of, uncertainty_of
from ebbtide.machines.evidence import EvidenceRange
from ebbtide.machines.kernels.efficiency import DEVIATIONS_OF_RANGE
from ebbtide.machines.machine import Machine

# Updates of published runs were predicted within about this factor by machines fitted
# to others (docs/validation.md).
_MODEL_FACTOR = 1.02
_NO_OFFLOAD = "gpu-only"
# Policies whose updates consist of the same operations.
_SAME_OPERATIONS = {"twin-flow": "zero-offload"}


class Range(NamedTuple):
    """A likely value, and the ends of the range that has it at 80 %."""

    likely: float
    low: float
    high: float

    @property
    def middle(self) -> float:
        """The middle of the range."""
        return (self.low + self.high) / 2

    def map(self, function: Callable[[float], float]) -> Range:
        """Return the range of a function that grows with the value."""
        return Range(*map(function, self))


class PolicyTime(NamedTuple):
    """The iteration of a policy, and its range."""

    policy: str
    ms: Range

    def as_json(self) -> dict[str, Any]:
        """Return an object of `policies` of `ebbtide plan --json`."""
        return {
            "policy": self.policy,
            "iteration_ms": self.ms.likely,
            "iteration_low_ms": self.ms.low,
            "iteration_high_ms": self.ms.high,
        }


def policy_time(
    steps: Steps,
    machine: Machine,
    compute_factor: float,
    evidence: EvidenceRange | None = None,
) -> PolicyTime:
    """Return the range of a policy's mean iteration on the machine that it was
    simulated on. The plan is simulated again with each uncertain rate, and the compute
    (within `compute_factor`), a standard error lower and higher. Changes of the
    logarithm are summed as squares, each direction apart, and extended to the 10th and
    the 90th percentile. A fit to runs of the policy has its residuals instead. Compute
    that was predicted has the range of its evidence, which is that of a whole iteration
    where nothing is offloaded."""
    likely = steps.iteration_s
    likely_ms = likely * 1e3
    if evidence is not None and steps.plan.policy == _NO_OFFLOAD:
        ends_ms = likely_ms * evidence.low, likely_ms * evidence.high
        return PolicyTime(steps.plan.policy, Range(likely_ms, *ends_ms))
    squares = {True: math.log(_MODEL_FACTOR) ** 2, False: math.log(_MODEL_FACTOR) ** 2}
    if evidence is not None:
        compute_factor = 1.0
        for side, end in ((True, evidence.high), (False, evidence.low)):
            squares[side] = (math.log(end) / DEVIATIONS_OF_RANGE) ** 2
    for iteration_s in _varied(steps, machine, compute_factor) if likely > 0 else ():
        change = math.log(iteration_s / likely)
        squares[change > 0] += change**2
    shorter, longer = (
        math.exp(DEVIATIONS_OF_RANGE * math.sqrt(squares[side]))
        for side in (False, True)
    )
    ms = Range(likely_ms, likely_ms / shorter, likely_ms * longer)
    return PolicyTime(steps.plan.policy, ms)


def residual_factor(policy: str, machine: Machine) -> float | None:
    """Return the factor (root mean square) within which a fit to such updates explains
    them; None without one."""
    if accuracy_of(machine).largest_error is None:
        return None
    policies, residuals = (
        section(section(machine.extra, "fit"), key) for key in ("policies", "residuals")
    )
    name, blocks = _operations(policy)
    fitted = {_operations(text) for text in policies.values() if isinstance(text, str)}
    errors = [
        float(value) for value in residuals.values() if isinstance(value, int | float)
    ]
    # Blocking copies of gradients are operations of their own; the update after them is
    # the same.
    if not any(
        other == name and (other_blocks or not blocks) for other, other_blocks in fitted
    ):
        return None
    return 1 + max(
        _MODEL_FACTOR - 1, math.sqrt(sum(error**2 for error in errors) / len(errors))
    )


def _operations(text: str) -> tuple[str, bool]:
    """Return what the operations of a policy follow from: its name, and whether copies
    of gradients block."""
    name = text.partition(",")[0].partition(":")[0]
    return _SAME_OPERATIONS.get(name, name), "grads=blocking" in text


def _varied(steps: Steps, machine: Machine, compute_factor: float) -> Iterator[float]:
    """Yield the iteration with each value one standard error lower and higher."""
    plan, workload = steps.plan, steps.valid.workload
    factor = residual_factor(plan.policy, machine)
    if factor is not None:
        exposed_s = steps.mean("exposed_s")
        yield steps.iteration_s + exposed_s * (factor - 1)
        yield steps.iteration_s - exposed_s * (1 - 1 / factor)
    for key, error in uncertainty_of(machine).items() if factor is None else ():
        value = getattr(machine, key, None)
        if isinstance(value, int | float) and value:
            for changed in (value * error, value / error):
                changes: dict[str, Any] = {key: changed}
                yield simulate_steps(
                    plan, workload, replace(machine, **changes)
                ).iteration_s
    for scale in (compute_factor, 1 / compute_factor):
        scaled = replace(
            workload,
            forward_s=workload.forward_s * scale,
            backward_s=workload.backward_s * scale,
            other_s=workload.other_s * scale,
        )
        yield simulate_steps(plan, scaled, machine).iteration_s
