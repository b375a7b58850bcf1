"""Conditions under which rules apply: a rule that does not apply has not looked at the job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ebbtide.analysis.findings.finding import NotApplicable
from ebbtide.analysis.metrics.activity.busy_time import busy_time
from ebbtide.analysis.metrics.drift import compared_quantities
from ebbtide.analysis.metrics.holders.growth import memory_growth
from ebbtide.analysis.metrics.trace_metrics import TraceMetrics
from ebbtide.analysis.timeseries.change_point import MIN_VALUES
from ebbtide.phases import BACKWARD, FORWARD


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
PASSES = Requirement(
    "phases of forward and backward",
    lambda metrics: metrics.phase_ms(FORWARD) is not None and metrics.phase_ms(BACKWARD) is not None,
)
GPU = Requirement("a job on a GPU", lambda metrics: metrics.has_gpu)
RANKS = Requirement("two ranks or more", lambda metrics: len(metrics.trace.ranks) > 1)
OFFLOADED = Requirement("optimizer state in host memory", lambda metrics: bool(metrics.offloaded))
CPU_UPDATE = Requirement(
    "an update on the CPU",
    lambda metrics: bool(metrics.offloaded) or (not metrics.has_gpu and bool(metrics.trace.ranks)),
)
DEEPSPEED = Requirement("a DeepSpeed job", lambda metrics: metrics.deepspeed is not None)
SUB_STEPS = Requirement(
    "sub-steps of DeepSpeed, with the update in the job's own process (`ebbtide profile` records them)",
    lambda metrics: metrics.sub_step("update") is not None,
)
SWAPPED = Requirement(
    "DeepSpeed's optimizer state on storage (offload_optimizer: nvme)",
    lambda metrics: metrics.deepspeed is not None and metrics.deepspeed.offload_config.get("device") == "nvme",
)
STORAGE_WAITS = Requirement(
    "waits for storage (`ebbtide profile` records those of DeepSpeed)",
    lambda metrics: any(use.wait_ms is not None for use in metrics.storage),
)
KERNELS = Requirement(
    "kernels of the GPU (import a torch.profiler trace)",
    lambda metrics: any(busy_time(metrics.trace, rank) is not None for rank in metrics.trace.ranks),
)
HOST_MEMORY = Requirement(
    "memory of the host (`ebbtide profile` records it)",
    lambda metrics: metrics.is_recorded or any(metrics.pool_peak(pool) is not None for pool in ("swap", "host")),
)
NUMA_NODES = Requirement(
    "NUMA nodes of the host (`ebbtide profile` records them)",
    lambda metrics: metrics.is_recorded or any(entry.numa is not None for entry in metrics.trace.meta.ranks),
)
ALLOCATIONS = Requirement(
    "the allocations of three iterations (`ebbtide profile --allocator-iterations 3`)",
    lambda metrics: any(memory_growth(metrics.trace, rank) is not None for rank in metrics.trace.ranks),
)
ENOUGH_VALUES = Requirement(
    f"{MIN_VALUES} steady iterations or more", lambda metrics: bool(compared_quantities(metrics.trace))
)

# Name of a rule -> its conditions. Rules without an entry apply to every trace.
REQUIREMENTS: dict[str, tuple[Requirement, ...]] = {
    "does-not-fit": (GPU,),
    "blocking-gradients": (ITERATIONS, OFFLOADED),
    "cpu-bound-update": (ITERATIONS, OFFLOADED),
    "too-few-threads": (ITERATIONS, CPU_UPDATE),
    "gradient-round-trip": (ITERATIONS, OFFLOADED, DEEPSPEED),
    "pageable-masters": (ITERATIONS, OFFLOADED, SUB_STEPS),
    "passes-beside-adam": (ITERATIONS, SUB_STEPS),
    "twin-flow-ratio": (ITERATIONS, GPU, DEEPSPEED),
    "lost-moments": (SWAPPED,),
    "storage-waits": (ITERATIONS, STORAGE_WAITS),
    "gradients-on-storage": (ITERATIONS, SWAPPED, STORAGE_WAITS),
    "few-swap-buffers": (ITERATIONS, SWAPPED, STORAGE_WAITS),
    "pageable-copies": (ITERATIONS, GPU),
    "one-direction": (ITERATIONS, GPU),
    "shared-link": (GPU, RANKS),
    "remote-numa-node": (GPU, NUMA_NODES),
    "free-memory": (GPU,),
    "memory-outside-torch": (GPU,),
    "memory-growth": (ALLOCATIONS,),
    "fragmentation": (GPU,),
    "swapping": (HOST_MEMORY,),
    "between-phases": (ITERATIONS, PASSES),
    "drift": (ENOUGH_VALUES,),
    "slow-rank": (ITERATIONS, RANKS),
    "gpu-idle": (KERNELS,),
    "launch-bound": (KERNELS,),
    "exposed-communication": (KERNELS,),
}


def not_applicable(rule: str, metrics: TraceMetrics) -> NotApplicable | None:
    """Return the conditions of a rule that a trace does not fulfil; None where the rule applies."""
    needs = tuple(need.text for need in REQUIREMENTS.get(rule, ()) if not need.is_met(metrics))
    return NotApplicable(rule, needs) if needs else None
