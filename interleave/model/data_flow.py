"""The check of plans, by what their operations read and write.

In the order of the plan every operation must find what it reads and fill places that
are empty. In the end each subgroup must be updated once, with its state where it was
and its new parameters on the device. Whoever uses a place must wait for the one that
has filled it, and whoever changes or empties it for all that have used it, by itself or
by others in between. So every order in which the operations may run gives what the
order of the plan gives.
"""

from dataclasses import dataclass, field

from ebbtide.errors import PlanError
from ebbtide.interleave.model.kinds import FACTOR, Flow, Kind, find_kind
from ebbtide.interleave.model.operations import (
    CLIPPING_FIRST,
    ONE_UPDATE,
    OTHER,
    STEP,
    UPDATE,
    Op,
    gradient_ready_points,
    plan_error,
    split_lane,
)
from ebbtide.interleave.model.plan import Plan
from ebbtide.interleave.model.workload import Workload

# Points that differ by less differ by rounding.
_ROUNDING = 1e-9
_ROUNDING_BYTES = 1e-6


def check_data_flow(plan: Plan, workload: Workload) -> None:
    """Check a plan by what its operations read and write. Raises PlanError if it is not
    valid."""
    _PlanCheck(plan, workload).run()


@dataclass(slots=True)
class _Content:
    """The content of a place.

    Attributes:
        writer: The operation that has put it there; -1: it is there when the iteration
            begins.
        ready: The point from which on it is there.
        is_new: Whether it comes from the update.
        is_tentative: Whether clipping may yet change it.
        readers: Operations that use it.
    """

    writer: int = -1
    ready: float = OTHER
    is_new: bool = False
    is_tentative: bool = False
    readers: list[int] = field(default_factory=list)


class _PlanCheck:
    """Walks through a plan once and tracks what is in each place."""

    def __init__(self, plan: Plan, workload: Workload) -> None:
        self._plan = plan
        self._ops = plan.ops
        self._clips = workload.clipping and plan.follows(CLIPPING_FIRST)
        # By place and subgroup, -1 for places of all; None where it was moved away.
        self._contents: dict[tuple[str, int], _Content | None] = {}
        until_step = workload.copies_at_step
        ready = (
            [UPDATE] * plan.subgroups if until_step else gradient_ready_points(workload)
        )
        for subgroup, point in enumerate(ready):
            self._contents["grad@job", subgroup] = _Content(ready=point)
            if subgroup in plan.kept_gradients:
                self._contents["grad@gpu", subgroup] = _Content(ready=point)
            if not plan.follows(ONE_UPDATE):
                self._contents["grad@part", subgroup] = _Content(ready=point)
        # By subgroup: the place of its state when the iteration begins, and its update.
        self._homes: dict[int, str] = {}
        self._updates: dict[int, Op] = {}
        # The earliest point at which each operation so far can start.
        self._points: list[float] = []

    def run(self) -> None:
        """Check the plan."""
        allocated = 0.0
        for index, op in enumerate(self._ops):
            kind = find_kind(op.kind)
            self._check_form(index, op, kind)
            self._points.append(
                max([op.start, *[self._points[before] for before in op.after]])
            )
            self._follow(index, op, kind.flow(op, self._plan))
            allocated += op.takes - op.gives
        if abs(allocated) > _ROUNDING_BYTES:
            raise PlanError(
                f"policy {self._plan.policy}: {allocated:.0f} bytes of device memory "
                "are not released"
            )
        self._check_results()

    def _check_form(self, index: int, op: Op, kind: Kind) -> None:
        if split_lane(op.resource)[0] not in kind.resources:
            raise self._error(op, f"cannot run on {op.resource}")
        if op.after and not 0 <= min(op.after) <= max(op.after) < index:
            raise self._error(op, "waits for a later operation")
        if not OTHER <= op.start <= STEP:
            raise self._error(
                op, f"starts at point {op.start}, which is outside of the iteration"
            )
        if kind.on_subgroups and not 0 <= op.subgroup < self._plan.subgroups:
            raise self._error(op, f"is on subgroup {op.subgroup}, which does not exist")

    def _follow(self, index: int, op: Op, flow: Flow) -> None:
        """Check that an operation finds what it uses, and record what it leaves."""
        used = [
            self._use(index, place, op.subgroup) for place in (*flow.reads, *flow.moves)
        ]
        for subgroup in range(self._plan.subgroups) if flow.reads_all else ():
            filled = [
                place
                for place in flow.reads_all
                if self._contents.get((place, subgroup))
            ]
            self._use(index, filled[0] if filled else flow.reads_all[0], subgroup)
        if any(content.is_tentative for content in used):
            self._use(index, FACTOR, -1)
        is_new = any(content.is_new for content in used)
        if flow.updates:
            if is_new:
                raise self._error(op, "is the second update")
            self._updates[op.subgroup] = op
        for place in flow.moves:
            self._empty(index, place)
        for place in flow.writes:
            if place in flow.reads:
                self._empty(index, place)
            key = _key(place, op.subgroup)
            if self._contents.get(key):
                raise self._error(
                    op, f"is repeated, or fills {place}, which is not empty"
                )
            # Places of all have nothing of an update.
            has_update = "@" in place and (is_new or flow.updates)
            self._contents[key] = _Content(index, OTHER, has_update, flow.is_tentative)

    def _use(self, index: int, place: str, subgroup: int) -> _Content:
        """Return what an operation finds in a place, for which it must wait."""
        if place == FACTOR and not self._clips:
            return _Content()
        key = _key(place, subgroup)
        if key not in self._contents:
            self._begin(place, subgroup)
        content = self._contents.get(key)
        if content is None:
            raise self._error(self._ops[index], f"finds no {place}")
        if self._points[index] < content.ready - _ROUNDING:
            raise self._error(
                self._ops[index],
                f"starts before the gradient of subgroup {subgroup} is ready",
            )
        self._require(index, content.writer)
        content.readers.append(index)
        return content

    def _begin(self, place: str, subgroup: int) -> None:
        """Record what is there when the iteration begins: state, and all places but the
        factor, by the first operation that uses each."""
        if place.startswith("state") and subgroup not in self._homes:
            if subgroup in self._plan.resident or subgroup in self._plan.parked:
                place = "state@gpu"
            elif place == "state@gpu":
                place = "state@host"
            self._homes[subgroup] = place
        elif "@" in place or place == FACTOR:
            return
        self._contents[_key(place, subgroup)] = _Content()

    def _empty(self, index: int, place: str) -> None:
        """Take away what is in a place, for whose use an operation must wait."""
        key = _key(place, self._ops[index].subgroup)
        content = self._contents[key]
        assert content is not None
        for before in content.readers:
            self._require(index, before)
        self._contents[key] = None

    def _check_results(self) -> None:
        """Check that every subgroup is updated, and where the results are.

        The next iteration expects them in certain places.
        """
        for subgroup in range(self._plan.subgroups):
            if subgroup not in self._updates:
                raise PlanError(
                    f"policy {self._plan.policy}: subgroup {subgroup} is never updated"
                )
            for place in (self._homes[subgroup], "param@gpu"):
                content = self._contents.get((place, subgroup))
                if content is None or not content.is_new:
                    raise self._error(
                        self._updates[subgroup], f"leaves no new {place} in the end"
                    )

    def _require(self, index: int, before: int) -> None:
        """Check that an operation waits for an earlier one, by itself or by others in
        between."""
        after = self._ops[index].after
        if before in after or before in (-1, index):
            return
        left, seen = [*after], set(after)
        while left:
            later = {one for one in self._ops[left.pop()].after if one >= before} - seen
            if before in later:
                return
            seen |= later
            left += later
        raise self._error(
            self._ops[index], f"does not wait for {self._ops[before].name}"
        )

    def _error(self, op: Op, problem: str) -> PlanError:
        return plan_error(self._plan.policy, op, problem)


def _key(place: str, subgroup: int) -> tuple[str, int]:
    return place, subgroup if "@" in place else -1
