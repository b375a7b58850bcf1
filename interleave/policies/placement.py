"""Placements: where each subgroup's state is kept and updated, in a few counts, and the plan that follows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ebbtide.interleave.model.plan import STEP, UPDATE, Plan, gradient_ready_points
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies.capacity import gradients_that_fit, slot_points
from ebbtide.interleave.policies.plan_builder import PlanBuilder


class PlacementChange(NamedTuple):
    """A change of the counts of a `Placement`, by field."""

    resident: int = 0
    moved: int = 0
    slots: int = 0
    early: int = 0
    late: int = 0
    round_trip_gradients: int = 0


@dataclass(frozen=True)
class Placement:
    """Counts of subgroups by where their state is. Subgroups neither resident nor moved are updated on the CPU.

    Attributes:
        resident: Subgroups whose state never leaves the device.
        moved: Subgroups whose state is fetched, updated on the device and flushed, one after the other.
        slots: How many moved subgroups fit on the device at once.
        early: How many of the first moved subgroups are fetched before the update, as soon as memory is free.
        late: How many of the last moved subgroups are flushed at the start of the next iteration. Subgroups both early
            and late are parked: their state leaves the device for the forward only.
        round_trip_gradients: How many gradients, those of the last moved subgroups, are copied down and back up even
            if there is memory to keep them.
        interleave_cpu_gpu: Without clipping: whether the CPU's subgroups alternate with the GPU's in the order of the
            backward. Otherwise they come first.
    """

    resident: int
    moved: int
    slots: int
    early: int = 0
    late: int = 0
    round_trip_gradients: int = 0
    interleave_cpu_gpu: bool = True

    def on_cpu(self, count: int) -> int:
        """Return how many of `count` subgroups are updated on the CPU."""
        return count - self.resident - self.moved

    @property
    def parked(self) -> int:
        """Number of subgroups that are both early and late."""
        return max(0, self.early + self.late - self.moved)

    def clamped(self, count: int, fit_in_update: int, fit_at_start: int) -> Placement:
        """Return the nearest placement that is possible.

        Args:
            count: Number of subgroups.
            fit_in_update: How many subgroups have state that fits on the device in the update.
            fit_at_start: How many fit when the iteration starts.
        """
        resident = min(max(self.resident, 0), count, fit_in_update, fit_at_start)
        moved = min(max(self.moved, 0), count - resident)
        slots = min(max(self.slots, 1), moved, fit_in_update - resident)
        if not slots:
            return Placement(resident, 0, 0)
        early = min(max(self.early, 0), slots)
        late = min(max(self.late, 0), slots, fit_at_start - resident)
        round_trips = min(max(self.round_trip_gradients, 0), resident + moved)
        return Placement(resident, moved, slots, early, late, round_trips, self.interleave_cpu_gpu)

    def changed(self, change: PlacementChange, times: int = 1) -> Placement:
        """Return the placement after so many times a change. Its counts may be out of range (see `clamped`)."""
        return Placement(
            self.resident + times * change.resident,
            self.moved + times * change.moved,
            self.slots + times * change.slots,
            self.early + times * change.early,
            self.late + times * change.late,
            self.round_trip_gradients + times * change.round_trip_gradients,
            self.interleave_cpu_gpu,
        )

    def scaled(self, factor: int) -> Placement:
        """Return the placement with every count multiplied."""
        return Placement(
            factor * self.resident,
            factor * self.moved,
            factor * self.slots,
            factor * self.early,
            factor * self.late,
            factor * self.round_trip_gradients,
            self.interleave_cpu_gpu,
        )


def plan_of(workload: Workload, placement: Placement, text: str) -> Plan:
    """Make the plan of a placement.

    Resident subgroups are the first ones, since the backward computes their gradients last. Uploads come before
    fetches on the link, since only subgroups of the CPU are uploaded. Subgroups that must be flushed are updated
    before those that stay.

    Args:
        workload: The workload to plan for.
        placement: A placement that is possible (see `Placement.clamped`).
        text: The policy's string.
    """
    builder = PlanBuilder(text, workload, early=True)
    resident = range(placement.resident)
    on_cpu, moved = _split(workload, placement)
    kept = [*resident, *moved][: len(resident) + len(moved) - placement.round_trip_gradients]
    if workload.needs_all_gradients:
        kept = gradients_that_fit(workload, resident, kept, moved, placement.slots)
    points = slot_points(workload, placement.resident, moved, placement.slots, kept)
    slots = _assign_slots(workload, moved, points)
    # The last subgroup in each slot stays in it, and is flushed at the start of the next iteration if it is late.
    last_in_slot = dict(zip(slots, moved, strict=True))
    late_subgroups = moved[len(moved) - placement.late :]
    late = {slot: subgroup for slot, subgroup in last_in_slot.items() if subgroup in late_subgroups}
    builder.leave(late.values())
    builder.gradients(keep=frozenset(kept))
    # By slot: the flush that frees it.
    freed_by = {slot: builder.leaving(subgroup) for slot, subgroup in late.items()}

    def fetch(number: int, point: float) -> None:
        slot = slots[number]
        builder.fetch(moved[number], (freed_by[slot],) if slot in freed_by else (), point)

    for number in range(placement.early):
        fetch(number, points[slots[number]])
    for subgroup in on_cpu:
        builder.on_cpu(subgroup)
    for number, subgroup in enumerate(moved):
        if number >= placement.early:
            fetch(number, _fetch_point(workload, points[slots[number]], number < placement.slots))
        update = builder.update_fetched(subgroup)
        if late.get(slots[number]) != subgroup:
            freed_by[slots[number]] = builder.flush(subgroup, update)
    for subgroup in resident:
        builder.resident(subgroup)
    return builder.plan()


def _assign_slots(workload: Workload, moved: list[int], points: list[float]) -> list[int]:
    """Return the slot of each moved subgroup: of the slots that have memory when it is due, the least recently used."""
    ready_points = gradient_ready_points(workload)
    last_used = [-1] * len(points)
    slots = []
    for number, subgroup in enumerate(moved):
        due = UPDATE if workload.needs_all_gradients else ready_points[subgroup]
        # Slots get their memory one after the other. The first one always counts.
        available = max(1, sum(point <= due for point in points))
        slot = min(range(available), key=last_used.__getitem__)
        last_used[slot] = number
        slots.append(slot)
    return slots


def _split(workload: Workload, placement: Placement) -> tuple[list[int], list[int]]:
    """Return the subgroups of the CPU and the moved ones, each in the order of their updates."""
    offloaded = range(placement.resident, len(workload.subgroups))
    if workload.needs_all_gradients:
        # The CPU gets those whose gradients are computed first: they have been copied down when the backward ends.
        return list(offloaded[placement.moved :]), list(offloaded[: placement.moved])
    # Updates follow the gradients, which come in reverse. Both kinds have work from the first gradient on.
    backward_order = offloaded[::-1]
    if not placement.interleave_cpu_gpu:
        on_cpu = placement.on_cpu(len(workload.subgroups))
        return list(backward_order[:on_cpu]), list(backward_order[on_cpu:])
    spacing = len(offloaded) / placement.moved if placement.moved else 0.0
    moved = [backward_order[int(spacing * number + spacing / 2)] for number in range(placement.moved)]
    return sorted(set(offloaded) - set(moved), reverse=True), moved


def _fetch_point(workload: Workload, slot_point: float, into_free_slot: bool) -> float:
    """Return when a fetch within the update may start.

    Fetches into a slot that is free when the update begins start when the backward is over, later ones with the step.
    """
    if not workload.needs_all_gradients:
        return slot_point
    return UPDATE if into_free_slot else STEP
