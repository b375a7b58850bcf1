"""Where each subgroup's state lives and is updated, in five numbers, and the plan of it."""

from __future__ import annotations

from dataclasses import dataclass

from ebbtide.interleave.model.plan import STEP, UPDATE, Plan, made_points
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies.capacity import gradients_with_room, slot_points
from ebbtide.interleave.policies.plan_builder import PlanBuilder


@dataclass(frozen=True)
class Placement:
    """Counts of subgroups; what is neither resident nor moved is updated on the CPU.

    resident: their state never leaves the device. moved: their state comes to the device, is updated there and goes
    again, one after the other. slots: how many of them have room on the device at once. early: so many of the first
    are fetched before the update, as soon as there is room for them. late: so many of the last leave at the start of
    the next iteration. What is both early and late is parked: it leaves for the forward alone.

    back: so many gradients go down and come back up though there may be room for them, those of the last that are
    moved. mixed, where nothing clips: the CPU's subgroups stand between those of the GPU in the order of the backward,
    else before them.
    """

    resident: int
    moved: int
    slots: int
    early: int = 0
    late: int = 0
    back: int = 0
    mixed: bool = True

    def on_cpu(self, count: int) -> int:
        return count - self.resident - self.moved

    @property
    def parked(self) -> int:
        return max(0, self.early + self.late - self.moved)

    def within(self, count: int, in_update: int, at_start: int) -> Placement:
        """The nearest that is sound: of `count` subgroups, with room for the state of so many in the update and when
        the iteration starts."""
        resident = min(max(self.resident, 0), count, in_update, at_start)
        moved = min(max(self.moved, 0), count - resident)
        slots = min(max(self.slots, 1), moved, in_update - resident)
        if not slots:
            return Placement(resident, 0, 0)
        early = min(max(self.early, 0), slots)
        late = min(max(self.late, 0), slots, at_start - resident)
        return Placement(resident, moved, slots, early, late, min(max(self.back, 0), resident + moved), self.mixed)

    def moved_by(self, step: tuple[int, ...], times: int) -> Placement:
        """A step along (resident, moved, slots, early, late, back)."""
        values = zip(self._counts(), step, strict=True)
        return self._with([value + times * share for value, share in values])

    def scaled(self, factor: int) -> Placement:
        return self._with([factor * value for value in self._counts()])

    def _with(self, counts: list[int]) -> Placement:
        resident, moved, slots, early, late, back = counts
        return Placement(resident, moved, slots, early, late, back, self.mixed)

    def _counts(self) -> tuple[int, ...]:
        return self.resident, self.moved, self.slots, self.early, self.late, self.back


def placed(workload: Workload, placement: Placement, text: str) -> Plan:
    """The plan of a placement, under the name `text`.

    Resident subgroups come first: the backward makes their gradients last. Uploads go before fetches on the link, since
    only what the CPU has updated is uploaded; what must leave again is updated before what stays.
    """
    builder = PlanBuilder(text, workload, early=True)
    resident = range(placement.resident)
    on_cpu, moved = _split(workload, placement)
    kept = [*resident, *moved][: len(resident) + len(moved) - placement.back]
    if workload.waits:
        kept = gradients_with_room(workload, resident, kept, moved, placement.slots)
    points = slot_points(workload, placement.resident, moved, placement.slots, kept)
    slots = _slots(workload, moved, points)
    # Who has each slot last keeps it, and leaves it at the start of the next iteration.
    lasts = dict(zip(slots, moved, strict=True))
    late = {slot: subgroup for slot, subgroup in lasts.items() if subgroup in moved[len(moved) - placement.late :]}
    builder.leave(late.values())
    builder.gradients(keep=frozenset(kept))
    # What gives each slot its room.
    free = {slot: builder.leaving(subgroup) for slot, subgroup in late.items()}

    def fetch(number: int, point: float) -> None:
        slot = slots[number]
        builder.fetch(moved[number], (free[slot],) if slot in free else (), point)

    for number in range(placement.early):
        fetch(number, points[slots[number]])
    for subgroup in on_cpu:
        builder.on_cpu(subgroup)
    for number, subgroup in enumerate(moved):
        if number >= placement.early:
            fetch(number, _fetch_point(workload, points[slots[number]], number < placement.slots))
        update = builder.update_fetched(subgroup)
        if late.get(slots[number]) != subgroup:
            free[slots[number]] = builder.flush(subgroup, update)
    for subgroup in resident:
        builder.resident(subgroup)
    return builder.plan()


def _slots(workload: Workload, moved: list[int], points: list[float]) -> list[int]:
    """Of each moved subgroup the slot it goes through: of those that there is room for when it is due, the one that was
    taken longest ago."""
    made = made_points(workload)
    taken = [-1] * len(points)
    found = []
    for number, subgroup in enumerate(moved):
        due = UPDATE if workload.waits else made[subgroup]
        # Slots have their room one after the other: the first always counts.
        there = max(1, sum(point <= due for point in points))
        slot = min(range(there), key=taken.__getitem__)
        taken[slot] = number
        found.append(slot)
    return found


def _split(workload: Workload, placement: Placement) -> tuple[list[int], list[int]]:
    """Subgroups of the CPU, and moved ones, in the order of their updates."""
    rest = range(placement.resident, len(workload.subgroups))
    if workload.waits:
        # Gradients that the backward makes first have gone down by its end.
        return list(rest[placement.moved :]), list(rest[: placement.moved])
    # Updates follow the gradients, which come in reverse: both kinds have work from the first on.
    backwards = rest[::-1]
    if not placement.mixed:
        on_cpu = placement.on_cpu(len(workload.subgroups))
        return list(backwards[:on_cpu]), list(backwards[on_cpu:])
    every = len(rest) / placement.moved if placement.moved else 0.0
    moved = [backwards[int(every * number + every / 2)] for number in range(placement.moved)]
    return sorted(set(rest) - set(moved), reverse=True), moved


def _fetch_point(workload: Workload, room: float, first: bool) -> float:
    """first: into a slot that is free when the update begins; such fetches are issued as soon as the backward is over,
    later ones by the step."""
    if not workload.waits:
        return room
    return UPDATE if first else STEP
