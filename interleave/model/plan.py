"""Plans: which operations one iteration runs, on which resource, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from ebbtide import seams
from ebbtide.interleave.model.operations import (
    BACKWARD,
    FORWARD,
    NO_DEPARTURES,
    OTHER,
    RESOURCES,
    STEP,
    STORAGE_RESOURCES,
    UPDATE,
    Departures,
    Op,
    OpKind,
    Resource,
    Rule,
    backward_points,
    forward_points,
    gradient_ready_points,
    point_at,
)
from ebbtide.interleave.model.workload import Workload

# Modules that work with plans import their operations and points from here, too.
__all__ = [
    "BACKWARD",
    "FORWARD",
    "OTHER",
    "RESOURCES",
    "STEP",
    "STORAGE_RESOURCES",
    "UPDATE",
    "Op",
    "OpKind",
    "Plan",
    "Resource",
    "backward_points",
    "forward_points",
    "gradient_ready_points",
    "point_at",
]


@dataclass(frozen=True, repr=False)
class Plan:
    """The operations of one iteration. Every iteration repeats them.

    Attributes:
        ops: Operations, in an order that respects `after`. Each resource runs its own
            in that order, one at a time.
        resident: Subgroups whose state never leaves the device.
        parked: Subgroups whose state is on the device when the iteration begins, leaves
            it during the iteration and returns before its end.
        kept_gradients: Subgroups whose gradient stays on the device until the update.
        cpu_share: The share of the CPU's update rate that the plan uses. With fewer
            threads the CPU leaves more of the bandwidth of host memory to copies.
        storage_buffers: Bytes of each buffer in host memory through which state passes
            that is in storage when the iteration begins and ends. State of other
            subgroups has a place of its own in host memory.
        remark: A note of the policy on this plan, for people.
        departures: Rules of valid plans that the plan does not follow, since the system
            that it is of does not.
        rolls_back: Whether a speculative update overwrites the old state, and is undone
            where clipping changes it.
        layers: What the plan does with the weights and activations of layers (a
            `LayerPlan`); None: nothing.
        has_gradient_buffers: Whether kept gradients have device memory of their own all
            the time; `resident_bytes` includes it.
    """

    policy: str
    ops: tuple[Op, ...]
    subgroups: int
    resident: frozenset[int]
    parked: frozenset[int]
    kept_gradients: frozenset[int]
    resident_bytes: float
    cpu_share: float = 1.0
    storage_buffers: tuple[float, ...] = ()
    remark: str = ""
    departures: Departures = NO_DEPARTURES
    rolls_back: bool = False
    layers: Any = None
    has_gradient_buffers: bool = False

    def __repr__(self) -> str:
        return (
            f"<Plan: {self.policy}, {len(self.ops):,} operations on {self.subgroups:,} "
            "subgroups>"
        )

    def validate(self, workload: Workload) -> Plan:
        """Check that the plan updates every subgroup exactly once.

        All inputs must be ready and all memory released.

        Rules that the plan departs from (`departures`) are left out.

        Returns:
            The plan itself.

        Raises:
            PlanError: An operation waits for a later one, reads what has not been
                written, is missing or repeated, or device memory is not released (see
                `data_flow.py`).
        """
        for check in _checks():
            check(self, workload)
        return self

    def follows(self, rule: Rule) -> bool:
        """Whether the plan follows a rule of valid plans."""
        return rule not in self.departures.rules

    @cached_property
    def casts(self) -> dict[int, Resource]:
        """The resource that converts parameters in a pass of its own, by subgroup."""
        return {op.subgroup: op.resource for op in self.ops if op.kind == "cast"}

    @cached_property
    def has_late_operations(self) -> bool:
        """Whether operations may end in the next iteration."""
        return any(op.is_late for op in self.ops)

    @property
    def is_exact(self) -> bool:
        """Whether each step gives the results that the workload asks for.

        Every plan without departures does.
        """
        return not self.departures.consequence

    @property
    def speculated(self) -> frozenset[int]:
        """The subgroups whose updates are speculative."""
        return frozenset(op.subgroup for op in self.ops if op.is_speculative)

    @property
    def has_late_updates(self) -> bool:
        """Whether the parameters may be new only in the next iteration.

        More is late then than writes to storage.
        """
        return any(op.is_late and op.kind != "write" for op in self.ops)

    @property
    def stored(self) -> frozenset[int]:
        """The subgroups with state in storage when the iteration begins and ends."""
        return frozenset(op.subgroup for op in self.ops if op.kind == "read")

    @property
    def updated_beside(self) -> frozenset[int]:
        """The subgroups that need memory for their new state beside the old one."""
        return frozenset() if self.rolls_back else self.speculated

    def counts(self) -> dict[str, int]:
        """Return the number of operations of each kind.

        Updates are counted per resource (`update on cpu`).
        """
        totals: dict[str, int] = {}
        for op in self.ops:
            name = f"update on {op.resource}" if op.kind == "update" else op.kind
            totals[name] = totals.get(name, 0) + 1
        return totals


@cache
def _checks() -> Sequence[Callable[[Plan, Workload], None]]:
    return seams.load_all("plan-checks")
