"""Random plans that the engine can run: every kind of placement, operations in any
legal order."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from hypothesis import strategies as st

from ebbtide.interleave.model.plan import (
    BACKWARD,
    FORWARD,
    OTHER,
    STEP,
    UPDATE,
    Op,
    OpKind,
    Plan,
    Resource,
    gradient_ready_points,
)
from ebbtide.interleave.model.workload import Workload

# Placements of a subgroup's state: on the host, without or with a separate cast;
# resident on the device; fetched, updated and flushed; parked on the device from the
# update to the beginning of the next iteration, or to a later point before the next
# update.
PLACEMENTS = ("cpu", "cast", "resident", "streamed", "parked")
_POINTS = (OTHER, 0.5, FORWARD, 1.5, BACKWARD, 2.5, UPDATE, 3.5, STEP)


def workload_of(
    sizes: Sequence[int],
    clipping: bool,
    gradients_held_until_step: bool,
    width: int = 2,
) -> Workload:
    """Return a job with subgroups of these sizes, and parameters of `width` bytes."""
    return Workload(
        name="random",
        params=sum(sizes),
        subgroup_params=max(sizes),
        sizes=tuple(sizes),
        forward_s=0.01,
        backward_s=0.02,
        param_bytes=width,
        grad_bytes=width,
        clipping=clipping,
        gradients_held_until_step=gradients_held_until_step,
    )


@st.composite
def plans(
    draw: st.DrawFn, workload: Workload, placements: Sequence[str] = PLACEMENTS
) -> Plan:
    """Draw valid plans with these placements."""
    count = len(workload.subgroups)
    chosen = draw(st.lists(st.sampled_from(placements), min_size=count, max_size=count))
    return make(
        workload,
        chosen,
        draw(st.frozensets(st.integers(0, count - 1))),
        draw(st.integers(0, 2**32)),
    )


def make(
    workload: Workload,
    placements: Sequence[str],
    kept: Collection[int] = (),
    seed: int = 0,
) -> Plan:
    """Return a valid plan with a placement for each subgroup.

    The gradients of the subgroups in `kept` stay on the device if they are needed
    there. An operation that acquires device memory waits for all earlier ones that
    release some, so `device_bytes` is enough."""
    maker = _Maker(workload, random.Random(seed))
    for subgroup, placement in enumerate(placements):
        maker.add(subgroup, placement, subgroup in kept)
    return maker.plan()


def device_bytes(plan: Plan, workload: Workload) -> float:
    """Return the peak of device memory of such a plan, without gradients that the job
    keeps there."""
    used = peak = plan.resident_bytes + workload.state_bytes * sum(
        workload.subgroups[s] for s in plan.parked
    )
    for op in plan.ops:
        used += op.takes
        peak = max(peak, used)
        used -= op.gives
    return peak


@dataclass
class _Maker:
    """Collects operations, named by (kind, subgroup), and puts them in a random
    order."""

    workload: Workload
    random: random.Random
    ops: dict[tuple[OpKind, int], Op] = field(default_factory=dict)
    after: dict[tuple[OpKind, int], list[tuple[OpKind, int]]] = field(
        default_factory=dict
    )
    resident: set[int] = field(default_factory=set)
    parked: set[int] = field(default_factory=set)
    kept: set[int] = field(default_factory=set)

    def add(self, subgroup: int, placement: str, kept: bool) -> None:
        returned_bytes = 0.0
        state, width = self.workload.state_bytes, self.workload.grad_bytes
        state_bytes = state * self.workload.subgroups[subgroup]
        ready_point = (
            UPDATE
            if self.workload.gradients_held_until_step
            else gradient_ready_points(self.workload)[subgroup]
        )
        # If gradients stay on the device until the step, updates get their inputs in
        # the step.
        scalars_point = STEP if self.workload.gradients_held_until_step else OTHER
        on_cpu = placement in ("cpu", "cast")
        pageable = on_cpu and self.random.random() < 0.3
        waits: list[tuple[OpKind, int]] = (
            [("clip", -1)] if self.workload.clipping else []
        )
        if kept and not on_cpu:
            self.kept.add(subgroup)
        else:
            self._op(
                "gradient down",
                "d2h",
                subgroup,
                width,
                start=ready_point,
                pageable=pageable,
            )
            waits.append(("gradient down", subgroup))
        if on_cpu:
            self._op("update", "cpu", subgroup, start=scalars_point, after=waits)
            last: OpKind = "update"
            if placement == "cast":
                last = "cast"
                self._op("cast", "cpu", subgroup, after=[("update", subgroup)])
            self._op(
                "upload",
                "h2d",
                subgroup,
                width,
                after=[(last, subgroup)],
                pageable=pageable,
            )
            return
        if not kept:
            returned_bytes = (
                self.workload.returned_gradient_bytes
                * self.workload.subgroups[subgroup]
            )
            self._op(
                "gradient up",
                "h2d",
                subgroup,
                width,
                after=list(waits),
                takes=returned_bytes,
            )
            waits.append(("gradient up", subgroup))
        if placement == "resident":
            self.resident.add(subgroup)
        else:
            if placement == "parked":
                self.parked.add(subgroup)
                self._op("flush", "d2h", subgroup, state, gives=state_bytes)
            flushed: list[tuple[OpKind, int]] = (
                [("flush", subgroup)] if placement == "parked" else []
            )
            self._op("fetch", "h2d", subgroup, state, after=flushed, takes=state_bytes)
            waits.append(("fetch", subgroup))
        self._op(
            "update",
            "gpu",
            subgroup,
            start=max(ready_point, scalars_point) if kept else scalars_point,
            after=waits,
            gives=returned_bytes,
        )
        if placement == "streamed":
            self._op(
                "flush",
                "d2h",
                subgroup,
                state,
                after=[("update", subgroup)],
                gives=state_bytes,
            )

    def plan(self) -> Plan:
        if self.workload.clipping:
            down = [name for name in self.ops if name[0] == "gradient down"]
            # The clip factor is known only in the step.
            self._op("clip", "cpu", -1, start=STEP, after=down)
        order = self._order()
        index = {name: number for number, name in enumerate(order)}
        ops = []
        # For each operation, those before it that have ended when it starts.
        ended: list[set[int]] = []
        freeing: list[int] = []
        taking: list[int] = []
        for number, name in enumerate(order):
            op = self.ops[name]
            after = {index[early] for early in self.after[name]}
            if number and self.random.random() < 0.2:
                after.add(self.random.randrange(number))
            if op.takes:
                after |= {*freeing, *taking[-1:]}
                taking.append(number)
            if op.gives:
                freeing.append(number)
            by_others = {early for one in after for early in ended[one]}
            ended.append(after | by_others)
            if self.random.random() < 0.5:
                after -= by_others
            ops.append(
                op._replace(after=tuple(self.random.sample(sorted(after), len(after))))
            )
        return Plan(
            policy="random",
            ops=tuple(ops),
            subgroups=len(self.workload.subgroups),
            resident=frozenset(self.resident),
            parked=frozenset(self.parked),
            kept_gradients=frozenset(self.kept),
            resident_bytes=self.workload.state_bytes
            * sum(self.workload.subgroups[s] for s in self.resident),
        ).validate(self.workload)

    def _op(
        self,
        kind: OpKind,
        resource: Resource,
        subgroup: int,
        bytes_per_param: float = 0.0,
        start: float = OTHER,
        after: Sequence[tuple[OpKind, int]] = (),
        pageable: bool = False,
        takes: float = 0.0,
        gives: float = 0.0,
    ) -> None:
        """Add an operation at a random point that is not earlier than `start`."""
        params = self.workload.subgroups[subgroup] if subgroup >= 0 else 0
        points = [start, *(later for later in _POINTS if later > start)]
        op = Op(
            kind,
            resource,
            subgroup,
            params,
            bytes_per_param * params,
            self.random.choice(points),
        )
        op = op._replace(pageable=pageable, takes=takes, gives=gives)
        self.ops[kind, subgroup] = op
        self.after[kind, subgroup] = list(after)

    def _order(self) -> list[tuple[OpKind, int]]:
        """Return a random order that respects all dependencies."""
        order: list[tuple[OpKind, int]] = []
        left = list(self.ops)
        while left:
            candidates = [
                name
                for name in left
                if all(early in order for early in self.after[name])
            ]
            order.append(self.random.choice(candidates))
            left.remove(order[-1])
        return order
