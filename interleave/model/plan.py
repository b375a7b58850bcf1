"""Plans: which operations one iteration runs, on which resource, and in which order; and the checks of plans."""

from __future__ import annotations

from dataclasses import dataclass

from ebbtide.errors import PlanError
from ebbtide.features.layers.layer_checks import check_layers
from ebbtide.features.layers.model import LayerPlan
from ebbtide.features.storage.storage_checks import check_storage
from ebbtide.interleave.model.kinds import find_kind, kinds
from ebbtide.interleave.model.operations import (
    BACKWARD,
    CLIPPING_FIRST,
    FORWARD,
    NO_DEPARTURES,
    ONE_UPDATE,
    ONE_UPLOAD,
    OTHER,
    OWN_GRADIENT,
    RESOURCES,
    STATE_ONLY,
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
    plan_error,
    point_at,
    uses_state_on_host,
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
    "uses_state_on_host",
]

# The rules without which operations may be repeated, by kind.
_REPEATABLE: dict[OpKind, Rule] = {"update": ONE_UPDATE, "upload": ONE_UPLOAD, "write": STATE_ONLY}
# Points that differ by less differ by rounding.
_ROUNDING = 1e-9


@dataclass(frozen=True, repr=False)
class Plan:
    """The operations of one iteration. Every iteration repeats them.

    Attributes:
        ops: Operations, in an order that respects `after`. Each resource runs its own in that order, one at a time.
        resident: Subgroups whose state never leaves the device.
        parked: Subgroups whose state is on the device when the iteration begins, leaves it during the iteration and
            returns before its end.
        kept_gradients: Subgroups whose gradient stays on the device until the update.
        cpu_share: The share of the CPU's update rate that the plan uses. With fewer threads the CPU leaves more of the
            bandwidth of host memory to copies.
        storage_buffers: Bytes of each buffer in host memory through which state passes that is in storage when the
            iteration begins and ends. State of other subgroups has a place of its own in host memory.
        remark: A note of the policy on this plan, for people.
        departures: Rules of valid plans that the plan does not follow, since the system that it is of does not.
        rolls_back: Whether a speculative update overwrites the old state, and is undone where clipping changes it.
        layers: What the plan does with the weights and activations of layers; None: nothing.
        has_gradient_buffers: Whether kept gradients have device memory of their own all the time; `resident_bytes`
            includes it.
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
    layers: LayerPlan | None = None
    has_gradient_buffers: bool = False

    def __repr__(self) -> str:
        return f"<Plan: {self.policy}, {len(self.ops):,} operations on {self.subgroups:,} subgroups>"

    def validate(self, workload: Workload) -> Plan:
        """Check that the plan updates every subgroup exactly once, with all inputs ready and all memory released.

        Rules that the plan departs from (`departures`) are left out.

        Returns:
            The plan itself.

        Raises:
            PlanError: An operation waits for a later one, reads what has not been written, is missing or repeated,
                or device memory is not released.
        """
        PlanChecker(self, workload).run()
        return self

    @property
    def has_late_operations(self) -> bool:
        """Whether operations may end in the next iteration."""
        return any(op.due is not None for op in self.ops)

    @property
    def is_exact(self) -> bool:
        """Whether each step gives the results that the workload asks for, as every plan without departures does."""
        return not self.departures.consequence

    @property
    def speculated(self) -> frozenset[int]:
        """The subgroups whose updates are speculative."""
        return frozenset(op.subgroup for op in self.ops if op.speculative)

    @property
    def has_late_updates(self) -> bool:
        """Whether the parameters may be new only in the next iteration: more is late than writes to storage."""
        return any(op.due is not None and op.kind != "write" for op in self.ops)

    @property
    def stored(self) -> frozenset[int]:
        """The subgroups whose state is in storage when the iteration begins and ends."""
        return frozenset(op.subgroup for op in self.ops if op.kind == "read")

    @property
    def updated_beside(self) -> frozenset[int]:
        """The subgroups that need memory for their new state beside the old one."""
        return frozenset() if self.rolls_back else self.speculated

    def counts(self) -> dict[str, int]:
        """Return the number of operations of each kind; updates are counted per resource (`update on cpu`)."""
        totals: dict[str, int] = {}
        for op in self.ops:
            name = f"update on {op.resource}" if op.kind == "update" else op.kind
            totals[name] = totals.get(name, 0) + 1
        return totals


class PlanChecker:
    """Walks through a plan once and tracks which operations each subgroup has had so far."""

    def __init__(self, plan: Plan, workload: Workload) -> None:
        self._plan = plan
        self._workload = workload
        self._clipping = workload.clipping
        self._left_out = plan.departures.rules
        self._gradient_points = (
            [UPDATE] * plan.subgroups if workload.gradients_held_until_step else gradient_ready_points(workload)
        )
        self._clip = -1
        # By kind and subgroup: the index of the operation, -1 before it has been reached.
        self._indices: dict[str, list[int]] = {
            name: [-1] * plan.subgroups for name, kind in kinds().items() if name != "clip" and not kind.on_layer
        }

    def run(self) -> None:
        """Check the plan. Raises PlanError if it is not valid."""
        allocated = 0.0
        for index, op in enumerate(self._plan.ops):
            kind = find_kind(op.kind)
            if op.resource not in kind.resources:
                raise self._error(op, f"cannot run on {op.resource}")
            if op.after and not 0 <= min(op.after) <= max(op.after) < index:
                raise self._error(op, "waits for a later operation")
            if not OTHER <= op.point <= STEP:
                raise self._error(op, f"starts at point {op.point}, which is outside of the iteration")
            allocated += op.acquire - op.release
            if kind.on_layer:
                continue
            if op.kind == "clip":
                self._check_clip(op)
                self._clip = index
                continue
            if not 0 <= op.subgroup < self._plan.subgroups:
                raise self._error(op, "is on a subgroup that does not exist")
            indices = self._indices[op.kind]
            if indices[op.subgroup] >= 0 and _REPEATABLE.get(op.kind) not in self._left_out:
                raise self._error(op, "is repeated")
            self._check_inputs(op)
            indices[op.subgroup] = index
        if abs(allocated) > 1e-6:
            raise PlanError(f"policy {self._plan.policy}: {allocated:.0f} bytes of device memory are not released")
        self._check_outputs()
        plan = self._plan
        if plan.has_late_operations:
            self._check_late_operations()
        check_layers(plan.policy, plan.ops, plan.layers, self._workload)
        check_storage(
            plan.policy,
            plan.ops,
            plan.storage_buffers,
            plan.resident | plan.parked,
            self._workload,
            STATE_ONLY in self._left_out,
        )

    def _check_clip(self, op: Op) -> None:
        """Clipping runs once and needs every gradient."""
        if self._clip >= 0:
            raise self._error(op, "is repeated")
        if op.point < UPDATE and self._plan.kept_gradients:
            raise self._error(op, "starts before all gradients are ready")
        inputs = set(op.after)
        for subgroup, down in enumerate(self._indices["gradient down"]):
            if down < 0 and op.point >= UPDATE:
                # On the device still: it is clipped there, and copied later if at all.
                continue
            if down not in inputs and subgroup not in self._plan.kept_gradients:
                raise self._error(op, f"does not wait for the gradient of subgroup {subgroup}")

    def _check_inputs(self, op: Op) -> None:
        """An operation must come after, and wait for, those that write what it reads."""
        subgroup = op.subgroup
        if op.kind == "gradient down":
            self._require_gradient(op)
            if self._clip >= 0 and self._clip not in op.after:
                raise self._error(op, "copies a gradient that is not clipped yet")
        elif op.kind == "gradient up":
            self._require(op, "gradient down")
        elif op.kind == "fetch" and subgroup in self._plan.parked:
            # Parked state was updated in the iteration before. It leaves the device first and returns later.
            self._require(op, "flush")
        elif op.kind == "flush" and subgroup in self._plan.resident:
            raise self._error(op, "removes state that is resident")
        elif op.kind == "cast" and op.resource == "gpu":
            self._require(op, "upload")
        elif (op.kind == "flush" and subgroup not in self._plan.parked) or op.kind == "cast":
            self._require(op, "update")
            if self._indices["upload"][subgroup] >= 0:
                raise self._error(op, "comes after the upload")
            self._require_validation(op)
        elif op.kind == "write" and self._indices["update"][subgroup] >= 0:
            # The old state is in storage until the new one is valid.
            self._require_validation(op)
        elif op.kind == "upload":
            if ONE_UPLOAD in self._left_out and self._indices["update"][subgroup] < 0:
                # Of parameters that the iteration before has updated.
                return
            self._require(op, "cast" if self._indices["cast"][subgroup] >= 0 else "update")
            self._require_validation(op)
        elif op.kind == "update":
            self._check_update(op)

    def _check_update(self, op: Op) -> None:
        subgroup = op.subgroup
        if op.speculative:
            if op.resource != "cpu" or not self._clipping or self._workload.gradients_held_until_step:
                raise self._error(op, "cannot be speculative: updates on the CPU can, before clipping")
        elif self._clipping and CLIPPING_FIRST not in self._left_out and self._clip not in op.after:
            raise self._error(op, "does not wait for the clipping of all gradients")
        if op.resource == "cpu":
            if subgroup in self._plan.resident or self._indices["fetch"][subgroup] >= 0:
                raise self._error(op, "runs on the CPU with its state on the device")
            if OWN_GRADIENT not in self._left_out:
                self._require(op, "gradient down")
            if subgroup in self._plan.parked:
                self._require(op, "flush")
            return
        if ONE_UPDATE in self._left_out:
            # A part of a subgroup, whose state and gradient are on the device.
            self._require_gradient(op)
            return
        if subgroup not in self._plan.resident:
            self._require(op, "fetch")
        if subgroup not in self._plan.kept_gradients:
            self._require(op, "gradient up")
        elif not self._clipping:
            self._require_gradient(op)

    def _require_validation(self, op: Op) -> None:
        """Check that nothing uses the result of a speculative update before clipping has said that it is valid."""
        update = self._plan.ops[self._indices["update"][op.subgroup]]
        if CLIPPING_FIRST in self._left_out:
            return
        if update.speculative and (self._clip < 0 or self._clip not in op.after):
            raise self._error(op, "does not wait for the clipping that its update speculates about")

    def _require_gradient(self, op: Op) -> None:
        if op.point < self._gradient_points[op.subgroup] - _ROUNDING:
            raise self._error(op, "starts before its gradient is ready")

    def _require(self, op: Op, kind: str) -> None:
        index = self._indices[kind][op.subgroup]
        if index < 0:
            raise self._error(op, f"comes without a {kind} before it")
        if index not in op.after:
            raise self._error(op, f"does not wait for its {kind}")

    def _check_outputs(self) -> None:
        """Every subgroup is updated, and the results are copied to where the next iteration expects them."""
        for subgroup, update in enumerate(self._indices["update"]):
            if update < 0:
                raise PlanError(f"policy {self._plan.policy}: subgroup {subgroup} is never updated")
            op = self._plan.ops[update]
            if op.resource == "cpu" and self._indices["upload"][subgroup] < 0:
                raise self._error(op, "is not followed by an upload")
            stays = subgroup in self._plan.resident or ONE_UPDATE in self._left_out
            if op.resource == "gpu" and not stays and self._indices["flush"][subgroup] < 0:
                raise self._error(op, "is not followed by a flush")

    def _check_late_operations(self) -> None:
        """Check that what follows a late operation is late, that parameters are new before the next forward uses them,
        and that the next iteration begins when all late operations have ended, as the engine does."""
        ops, needed = self._plan.ops, forward_points(self._workload)
        for op in ops:
            kind = find_kind(op.kind)
            if op.point < BACKWARD and not kind.on_layer:
                raise self._error(op, "may start before the late operations of the iteration before have ended")
            if op.due is None:
                if any(ops[index].due is not None for index in op.after):
                    raise self._error(op, "waits for a late operation and is not late")
                continue
            if not kind.may_be_late:
                raise self._error(op, "cannot be late")
            in_place = self._workload.gradients_held_until_step and op.subgroup in self._plan.kept_gradients
            if in_place and op.kind == "update":
                raise self._error(op, "cannot be late: the job holds its gradient only until the step returns")
            limit = needed[op.subgroup] if kind.writes_parameters else BACKWARD
            if not FORWARD <= op.due <= limit:
                raise self._error(op, f"is due at point {op.due}, which must be from {FORWARD} to {limit}")

    def _error(self, op: Op, problem: str) -> PlanError:
        return plan_error(self._plan.policy, op, problem)
