"""Random plans that the engine can run: subgroups handled in every way there is, operations in any legal order."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from hypothesis import strategies as st

from ebbtide.interleave.model.plan import BACKWARD, FORWARD, OTHER, STEP, UPDATE, Kind, Op, Plan, Resource, made_points
from ebbtide.interleave.model.workload import Workload

# Of a subgroup's state: on the host, with a cast of its own or without; on the device for good; fetched, updated and
# flushed; on the device from the update to the beginning of the next iteration, or to somewhere before the next update.
HOMES = ("cpu", "cast", "resident", "streamed", "parked")
_POINTS = (OTHER, 0.5, FORWARD, 1.5, BACKWARD, 2.5, UPDATE, 3.5, STEP)


def workload_of(sizes: Sequence[int], clipping: bool, gradients_stay: bool, width: int = 2) -> Workload:
    """A job whose step updates subgroups of so many parameters, of `width` bytes each."""
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
        gradients_stay=gradients_stay,
    )


@st.composite
def plans(draw: st.DrawFn, workload: Workload, homes: Sequence[str] = HOMES) -> Plan:
    """Sound plans with subgroups in some of these homes."""
    count = len(workload.subgroups)
    chosen = draw(st.lists(st.sampled_from(homes), min_size=count, max_size=count))
    return make(workload, chosen, draw(st.frozensets(st.integers(0, count - 1))), draw(st.integers(0, 2**32)))


def make(workload: Workload, homes: Sequence[str], kept: Collection[int] = (), seed: int = 0) -> Plan:
    """A sound plan with each subgroup in its home. kept: whose gradient stays on the device, if it is needed there.
    Whatever takes device memory waits for what gives some back before it, so `device_bytes` is enough."""
    maker = _Maker(workload, random.Random(seed))
    for subgroup, home in enumerate(homes):
        maker.add(subgroup, home, subgroup in kept)
    return maker.plan()


def device_bytes(plan: Plan, workload: Workload) -> float:
    """What such a plan has on the device at most, gradients that the job keeps there apart."""
    taken = most = plan.held_bytes + workload.state_bytes * sum(workload.subgroups[s] for s in plan.parked)
    for op in plan.ops:
        taken += op.acquire
        most = max(most, taken)
        taken -= op.release
    return most


@dataclass
class _Maker:
    """Collects operations that name each other by (kind, subgroup), then puts them in a random order."""

    workload: Workload
    random: random.Random
    ops: dict[tuple[Kind, int], Op] = field(default_factory=dict)
    after: dict[tuple[Kind, int], list[tuple[Kind, int]]] = field(default_factory=dict)
    resident: set[int] = field(default_factory=set)
    parked: set[int] = field(default_factory=set)
    kept: set[int] = field(default_factory=set)

    def add(self, subgroup: int, home: str, kept: bool) -> None:
        state, width = self.workload.state_bytes, self.workload.grad_bytes
        room = state * self.workload.subgroups[subgroup]
        made = UPDATE if self.workload.gradients_stay else made_points(self.workload)[subgroup]
        # Where gradients stay until the step, it is the step that tells what an update works with.
        told = STEP if self.workload.gradients_stay else OTHER
        on_cpu = home in ("cpu", "cast")
        pageable = on_cpu and self.random.random() < 0.3
        waits: list[tuple[Kind, int]] = [("clip", -1)] if self.workload.clipping else []
        if kept and not on_cpu:
            self.kept.add(subgroup)
        else:
            self._op("gradient down", "d2h", subgroup, width, point=made, pageable=pageable)
            waits.append(("gradient down", subgroup))
        if on_cpu:
            self._op("update", "cpu", subgroup, point=told, after=waits)
            last: Kind = "update"
            if home == "cast":
                last = "cast"
                self._op("cast", "cpu", subgroup, after=[("update", subgroup)])
            self._op("upload", "h2d", subgroup, width, after=[(last, subgroup)], pageable=pageable)
            return
        if not kept:
            self._op("gradient up", "h2d", subgroup, width, after=list(waits))
            waits.append(("gradient up", subgroup))
        if home == "resident":
            self.resident.add(subgroup)
        else:
            if home == "parked":
                self.parked.add(subgroup)
                self._op("flush", "d2h", subgroup, state, release=room)
            gone: list[tuple[Kind, int]] = [("flush", subgroup)] if home == "parked" else []
            self._op("fetch", "h2d", subgroup, state, after=gone, acquire=room)
            waits.append(("fetch", subgroup))
        self._op("update", "gpu", subgroup, point=max(made, told) if kept else told, after=waits)
        if home == "streamed":
            self._op("flush", "d2h", subgroup, state, after=[("update", subgroup)], release=room)

    def plan(self) -> Plan:
        if self.workload.clipping:
            down = [name for name in self.ops if name[0] == "gradient down"]
            # Only the step tells by how much.
            self._op("clip", "cpu", -1, point=STEP, after=down)
        order = self._order()
        index = {name: number for number, name in enumerate(order)}
        ops = []
        freeing: list[int] = []
        taking: list[int] = []
        for number, name in enumerate(order):
            op = self.ops[name]
            after = {index[early] for early in self.after[name]}
            if number and self.random.random() < 0.2:
                after.add(self.random.randrange(number))
            if op.acquire:
                after |= {*freeing, *taking[-1:]}
                taking.append(number)
            if op.release:
                freeing.append(number)
            ops.append(op._replace(after=tuple(self.random.sample(sorted(after), len(after)))))
        return Plan(
            policy="random",
            ops=tuple(ops),
            subgroups=len(self.workload.subgroups),
            resident=frozenset(self.resident),
            parked=frozenset(self.parked),
            kept_gradients=frozenset(self.kept),
            held_bytes=self.workload.state_bytes * sum(self.workload.subgroups[s] for s in self.resident),
        ).validate(self.workload)

    def _op(
        self,
        kind: Kind,
        resource: Resource,
        subgroup: int,
        bytes_per_param: float = 0.0,
        point: float = OTHER,
        after: Sequence[tuple[Kind, int]] = (),
        pageable: bool = False,
        acquire: float = 0.0,
        release: float = 0.0,
    ) -> None:
        """point: the earliest one."""
        params = self.workload.subgroups[subgroup] if subgroup >= 0 else 0
        points = [point, *(later for later in _POINTS if later > point)]
        op = Op(kind, resource, subgroup, params, bytes_per_param * params, self.random.choice(points))
        op = op._replace(pageable=pageable, acquire=acquire, release=release)
        self.ops[kind, subgroup] = op
        self.after[kind, subgroup] = list(after)

    def _order(self) -> list[tuple[Kind, int]]:
        """Any order in which everything comes after what it waits for."""
        order: list[tuple[Kind, int]] = []
        left = list(self.ops)
        while left:
            there = [name for name in left if all(early in order for early in self.after[name])]
            order.append(self.random.choice(there))
            left.remove(order[-1])
        return order
