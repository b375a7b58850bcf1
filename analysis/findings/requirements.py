"""Conditions under which rules apply: a rule that does not apply has not looked at the job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ebbtide.analysis.findings.finding import NotApplicable
from ebbtide.analysis.metrics.activity.busy_time import busy_time
from ebbtide.analysis.metrics.trace_metrics import TraceMetrics


@dataclass(frozen=True)
class Requirement:
    """A condition of rules.

    Attributes:
        text: Description of a trace that fulfils it.
        is_met: Function that checks a trace.
    """

    text: str
    is_met: Callable[[TraceMetrics], bool]


ITERATIONS = Requirement("finished iterations with phases", lambda metrics: metrics.iteration_ms is not None)
GPU = Requirement("a job on a GPU", lambda metrics: metrics.has_gpu)
RANKS = Requirement("two ranks or more", lambda metrics: len(metrics.trace.ranks) > 1)
OFFLOADED = Requirement("optimizer state in host memory", lambda metrics: bool(metrics.offloaded))
CPU_UPDATE = Requirement(
    "an update on the CPU",
    lambda metrics: bool(metrics.offloaded) or (not metrics.has_gpu and bool(metrics.trace.ranks)),
)
DEEPSPEED = Requirement("a DeepSpeed job", lambda metrics: metrics.deepspeed is not None)
SUB_STEPS = Requirement(
    "sub-steps of DeepSpeed (`ebbtide profile` records them)", lambda metrics: metrics.sub_step("update") is not None
)
KERNELS = Requirement(
    "kernels of the GPU (import a torch.profiler trace)",
    lambda metrics: any(busy_time(metrics.trace, rank) is not None for rank in metrics.trace.ranks),
)

# Name of a rule -> its conditions. Rules without an entry apply to every trace.
REQUIREMENTS: dict[str, tuple[Requirement, ...]] = {
    "blocking-gradients": (ITERATIONS, OFFLOADED),
    "cpu-bound-update": (ITERATIONS, OFFLOADED),
    "too-few-threads": (ITERATIONS, CPU_UPDATE),
    "gradient-round-trip": (ITERATIONS, OFFLOADED, DEEPSPEED),
    "pageable-masters": (ITERATIONS, OFFLOADED, SUB_STEPS),
    "passes-beside-adam": (ITERATIONS, SUB_STEPS),
    "twin-flow-ratio": (ITERATIONS, GPU, DEEPSPEED),
    "pageable-copies": (ITERATIONS, GPU),
    "one-direction": (ITERATIONS, GPU),
    "shared-link": (GPU, RANKS),
    "remote-numa-node": (GPU,),
    "free-memory": (ITERATIONS, GPU),
    "memory-outside-torch": (ITERATIONS, GPU),
    "fragmentation": (ITERATIONS, GPU),
    "between-phases": (ITERATIONS,),
    "slow-rank": (ITERATIONS, RANKS),
    "gpu-idle": (ITERATIONS, KERNELS),
    "launch-bound": (ITERATIONS, KERNELS),
    "exposed-communication": (ITERATIONS, KERNELS),
}


def not_applicable(rule: str, metrics: TraceMetrics) -> NotApplicable | None:
    """Return the conditions of a rule that a trace does not fulfil; None where the rule applies."""
    needs = tuple(need.text for need in REQUIREMENTS.get(rule, ()) if not need.is_met(metrics))
    return NotApplicable(rule, needs) if needs else None
