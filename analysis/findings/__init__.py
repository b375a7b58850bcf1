"""Rules that find what slows a job down: one file per rule, named for its finding."""

from __future__ import annotations

from collections.abc import Callable

from ebbtide.analysis.findings import (
    between_phases,
    blocking_gradients,
    cpu_bound_update,
    does_not_fit,
    drift,
    exposed_communication,
    few_swap_buffers,
    fragmentation,
    free_memory,
    gpu_idle,
    gradient_round_trip,
    gradients_on_storage,
    host_memory_limit,
    launch_bound,
    lost_moments,
    memory_growth,
    memory_outside_torch,
    one_direction,
    pageable_copies,
    pageable_masters,
    passes_beside_adam,
    phases,
    remote_numa_node,
    shared_link,
    slow_rank,
    storage_waits,
    swapping,
    too_few_threads,
    twin_flow_ratio,
)
from ebbtide.analysis.findings.finding import Finding, Findings, NotApplicable, Unknown
from ebbtide.analysis.findings.requirements import not_applicable
from ebbtide.analysis.metrics.trace_metrics import TraceMetrics
from ebbtide.profiler.trace import Trace

__all__ = ["RULES", "Finding", "Findings", "NotApplicable", "Rule", "Unknown", "find"]

# A rule returns a Finding, an Unknown where the trace cannot answer its question, or None where it finds nothing.
Rule = Callable[[TraceMetrics], Finding | Unknown | None]

# Findings without a gain, and questions, are listed in this order.
RULES: tuple[Rule, ...] = (
    phases.check,
    does_not_fit.check,
    blocking_gradients.check,
    cpu_bound_update.check,
    too_few_threads.check,
    gradient_round_trip.check,
    pageable_masters.check,
    passes_beside_adam.check,
    twin_flow_ratio.check,
    lost_moments.check,
    storage_waits.check,
    gradients_on_storage.check,
    few_swap_buffers.check,
    pageable_copies.check,
    one_direction.check,
    shared_link.check,
    remote_numa_node.check,
    free_memory.check,
    memory_outside_torch.check,
    fragmentation.check,
    memory_growth.check,
    swapping.check,
    host_memory_limit.check,
    between_phases.check,
    slow_rank.check,
    drift.check,
    gpu_idle.check,
    launch_bound.check,
    exposed_communication.check,
)


def find(trace: Trace) -> Findings:
    """Apply every rule to a trace.

    Returns:
        Findings with a potential gain come first, the largest at the top. Gains of different findings overlap: do not
        add them.
    """
    metrics = TraceMetrics(trace)
    results = [rule(metrics) for rule in RULES]
    silent = [_name(rule) for rule, result in zip(RULES, results, strict=True) if result is None]
    skipped = [entry for name in silent if (entry := not_applicable(name, metrics)) is not None]
    findings = [result for result in results if isinstance(result, Finding)]
    findings.sort(key=lambda finding: -(finding.potential_gain_ms or 0.0))
    unknown = tuple(result for result in results if isinstance(result, Unknown))
    not_looked = {entry.rule for entry in skipped} | {_name(phases.check)}
    nothing_found = tuple(name for name in silent if name not in not_looked)
    return Findings(tuple(findings), unknown, tuple(skipped), nothing_found)


def _name(rule: Rule) -> str:
    """Return the name of a rule: that of its module, with hyphens."""
    return rule.__module__.rpartition(".")[2].replace("_", "-")
