"""What holds a job back: small rules, each with its evidence and what it is worth."""

from __future__ import annotations

from collections.abc import Callable

from ebbtide.analysis.findings import copies, deepspeed, gradients, host, iteration, memory, update
from ebbtide.analysis.findings.finding import Finding, Findings, Unknown
from ebbtide.analysis.metrics.trace_metrics import Study
from ebbtide.profiler.trace import Trace

__all__ = ["RULES", "Finding", "Findings", "Unknown", "find"]

# A rule looks at a trace: a Finding, an Unknown where the trace cannot tell, None where all is well.
Rule = Callable[[Study], Finding | Unknown | None]

RULES: tuple[Rule, ...] = (
    iteration.phases_recorded,
    gradients.blocking_gradients,
    update.cpu_bound_update,
    update.too_few_threads,
    deepspeed.gradient_round_trip,
    deepspeed.pageable_masters,
    deepspeed.passes_beside_adam,
    deepspeed.twin_flow_ratio,
    copies.pageable_copies,
    copies.one_direction,
    copies.shared_link,
    memory.free_memory,
    memory.memory_outside_torch,
    memory.fragmentation,
    host.swapping,
    iteration.between_phases,
    iteration.slow_rank,
)


def find(trace: Trace) -> Findings:
    """Ask every rule. Findings with a worth come first, the dearest at the top; worths of different findings overlap:
    they do not add up."""
    study = Study(trace)
    said = [rule(study) for rule in RULES]
    findings = sorted((s for s in said if isinstance(s, Finding)), key=lambda f: -(f.worth_ms or 0.0))
    return Findings(tuple(findings), tuple(s for s in said if isinstance(s, Unknown)))
