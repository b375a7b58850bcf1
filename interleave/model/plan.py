"""A plan: what is moved and updated in one iteration, where, and what waits for what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from ebbtide.errors import PlanError
from ebbtide.interleave.model.workload import Workload

Kind = Literal["gradient down", "gradient up", "clip", "fetch", "update", "flush", "cast", "upload"]
Resource = Literal["cpu", "gpu", "h2d", "d2h"]
RESOURCES: tuple[Resource, ...] = ("cpu", "gpu", "h2d", "d2h")

# Points of an iteration at which an operation may begin: the number of the phase plus the share of it that is done.
# The update begins at UPDATE; at STEP the optimizer's step has got going, and its operations are issued.
OTHER, FORWARD, BACKWARD, UPDATE, STEP = 0.0, 1.0, 2.0, 3.0, 4.0

_WHERE: dict[str, tuple[Resource, ...]] = {
    "gradient down": ("d2h",),
    "gradient up": ("h2d",),
    "clip": ("cpu",),
    "fetch": ("h2d",),
    "update": ("cpu", "gpu"),
    "flush": ("d2h",),
    "cast": ("cpu",),
    "upload": ("h2d",),
}


class Op(NamedTuple):
    """One operation on one subgroup.

    params, nbytes: its work (bytes moved; 0 for updates and casts). point: the earliest place in the iteration, see
    above. after: indices of operations that must have ended. pageable: of the host memory of a copy. blocking: forward
    and backward stand still until it has ended. acquire, release: bytes of device memory taken when it begins and given
    back when it ends.
    """

    kind: Kind
    resource: Resource
    subgroup: int
    params: int
    nbytes: float
    point: float
    after: tuple[int, ...] = ()
    pageable: bool = False
    blocking: bool = False
    acquire: float = 0.0
    release: float = 0.0


@dataclass(frozen=True)
class Plan:
    """The operations of one iteration, which repeats. They stand in an order that respects `after`; each resource takes
    its own in that order, one at a time.

    resident: subgroups whose state never leaves the device. parked: subgroups whose state is on the device when the
    iteration begins, leaves it in the iteration and comes back. kept_gradients: subgroups whose gradient stays on the
    device until the update. held_bytes: device memory that is taken all the time (resident state). remark: what a
    policy has to say of it.
    """

    policy: str
    ops: tuple[Op, ...]
    subgroups: int
    resident: frozenset[int]
    parked: frozenset[int]
    kept_gradients: frozenset[int]
    held_bytes: float
    remark: str = ""

    def validate(self, workload: Workload) -> Plan:
        """The plan itself. Raises PlanError where something waits for what comes later, is read before it is written,
        happens twice or never, or device memory is not given back."""
        Check(self, workload).run()
        return self

    def counts(self) -> dict[str, int]:
        """How many operations there are of each kind, updates by where they run."""
        found: dict[str, int] = {}
        for op in self.ops:
            name = f"update on {op.resource}" if op.kind == "update" else op.kind
            found[name] = found.get(name, 0) + 1
        return found


class Check:
    """Walks through a plan once, knowing of each subgroup what has happened to it."""

    def __init__(self, plan: Plan, workload: Workload) -> None:
        self._plan = plan
        self._clipping = workload.clipping
        self._made = [UPDATE] * plan.subgroups if workload.gradients_stay else made_points(workload)
        self._clip = -1
        kinds: tuple[Kind, ...] = ("gradient down", "gradient up", "fetch", "update", "flush", "cast", "upload")
        # Of each kind the index of a subgroup's operation, -1 where it has not come yet.
        self._seen: dict[str, list[int]] = {kind: [-1] * plan.subgroups for kind in kinds}

    def run(self) -> None:
        taken = 0.0
        for index, op in enumerate(self._plan.ops):
            if op.resource not in _WHERE[op.kind]:
                raise self._wrong(op, f"cannot run on {op.resource}")
            if op.after and not 0 <= min(op.after) <= max(op.after) < index:
                raise self._wrong(op, "waits for what comes later")
            if not OTHER <= op.point <= STEP:
                raise self._wrong(op, f"begins at {op.point}, which is no place in an iteration")
            taken += op.acquire - op.release
            if op.kind == "clip":
                self._clips(op)
                self._clip = index
                continue
            if not 0 <= op.subgroup < self._plan.subgroups:
                raise self._wrong(op, "is of none that there is")
            seen = self._seen[op.kind]
            if seen[op.subgroup] >= 0:
                raise self._wrong(op, "comes twice")
            self._inputs(op)
            seen[op.subgroup] = index
        if abs(taken) > 1e-6:
            raise PlanError(f"policy {self._plan.policy}: {taken:.0f} bytes of device memory are not given back")
        self._outputs()

    def _clips(self, op: Op) -> None:
        """Clipping comes once and needs every gradient."""
        if self._clip >= 0:
            raise self._wrong(op, "comes twice")
        if op.point < UPDATE and self._plan.kept_gradients:
            raise self._wrong(op, "comes before all gradients are made")
        inputs = set(op.after)
        for subgroup, down in enumerate(self._seen["gradient down"]):
            if down not in inputs and subgroup not in self._plan.kept_gradients:
                raise self._wrong(op, f"does not wait for the gradient of subgroup {subgroup}")

    def _inputs(self, op: Op) -> None:
        """What an operation reads must be there, and it must wait for it."""
        subgroup = op.subgroup
        if op.kind == "gradient down":
            self._is_made(op)
        elif op.kind == "gradient up":
            self._waits(op, "gradient down")
        elif op.kind == "fetch" and subgroup in self._plan.parked:
            # It leaves the device first, with what the iteration before made, and comes back.
            self._waits(op, "flush")
        elif op.kind == "flush" and subgroup in self._plan.resident:
            raise self._wrong(op, "takes state away that stays for good")
        elif (op.kind == "flush" and subgroup not in self._plan.parked) or op.kind == "cast":
            self._waits(op, "update")
            if self._seen["upload"][subgroup] >= 0:
                raise self._wrong(op, "comes after the upload")
        elif op.kind == "upload":
            self._waits(op, "cast" if self._seen["cast"][subgroup] >= 0 else "update")
        elif op.kind == "update":
            if self._clipping and (self._clip < 0 or self._clip not in op.after):
                raise self._wrong(op, "does not wait for the clipping of all gradients")
            if op.resource == "cpu":
                if subgroup in self._plan.resident or self._seen["fetch"][subgroup] >= 0:
                    raise self._wrong(op, "runs on the CPU with its state on the device")
                self._waits(op, "gradient down")
                if subgroup in self._plan.parked:
                    self._waits(op, "flush")
                return
            if subgroup not in self._plan.resident:
                self._waits(op, "fetch")
            if subgroup not in self._plan.kept_gradients:
                self._waits(op, "gradient up")
            elif not self._clipping:
                self._is_made(op)

    def _is_made(self, op: Op) -> None:
        if op.point < self._made[op.subgroup]:
            raise self._wrong(op, "begins before its gradient is made")

    def _waits(self, op: Op, kind: str) -> None:
        index = self._seen[kind][op.subgroup]
        if index < 0:
            raise self._wrong(op, f"comes without a {kind} before it")
        if index not in op.after:
            raise self._wrong(op, f"does not wait for its {kind}")

    def _outputs(self) -> None:
        """Every subgroup is updated, and what was updated gets to where it belongs."""
        for subgroup, update in enumerate(self._seen["update"]):
            if update < 0:
                raise PlanError(f"policy {self._plan.policy}: subgroup {subgroup} is never updated")
            op = self._plan.ops[update]
            if op.resource == "cpu" and self._seen["upload"][subgroup] < 0:
                raise self._wrong(op, "is not followed by an upload")
            if op.resource == "gpu" and subgroup not in self._plan.resident and self._seen["flush"][subgroup] < 0:
                raise self._wrong(op, "is not followed by a flush")

    def _wrong(self, op: Op, what: str) -> PlanError:
        return PlanError(f"policy {self._plan.policy}: {op.kind} of subgroup {op.subgroup} {what}")


def made_points(workload: Workload) -> list[float]:
    """The points at which the backward has made each subgroup's gradient: in reverse, the last those of subgroup 0."""
    points, done = [], 0
    for size in reversed(workload.subgroups):
        done += size
        points.append(min(BACKWARD + done / workload.params, UPDATE))
    return points[::-1]


def point_at(workload: Workload, seconds: float) -> float:
    """The point of an iteration that lies so many seconds after its start, nothing having waited."""
    begin = 0.0
    for phase, length in enumerate((workload.other_s, workload.forward_s, workload.backward_s)):
        if seconds < begin + length:
            return phase + max(0.0, (seconds - begin) / length)
        begin += length
    return UPDATE
