"""Plans of systems that do not clip gradients."""

from dataclasses import replace

from ebbtide.interleave.model.operations import CLIPPING_FIRST, Departures
from ebbtide.interleave.model.plan import Plan
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies.plan_builder import PlanBuilder


def unclipped_builder(text: str, workload: Workload) -> PlanBuilder:
    """Return a builder of plans that update as soon as gradients are ready, whether or not the workload clips."""
    return PlanBuilder(text, replace(workload, clipping=False), early=True)


def unclipped_plan(builder: PlanBuilder, workload: Workload, system: str) -> Plan:
    """Return the plan of a builder, which departs from clipping if the workload clips."""
    plan = builder.plan(validate=False)
    if workload.clipping:
        consequence = f"{system} does not clip gradients: steps whose norm is too large, or not finite, are not changed"
        plan = replace(plan, departures=Departures(frozenset({CLIPPING_FIRST}), consequence))
    return plan.validate(workload)
