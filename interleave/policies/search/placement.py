"""Placements: assignments given by a few counts, for subgroups that are all alike or sorted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies.search.assignment import Assignment


class PlacementChange(NamedTuple):
    """A change of the counts of a `Placement`, by field."""

    resident: int = 0
    moved: int = 0
    slots: int = 0
    early: int = 0
    late: int = 0
    round_trip_gradients: int = 0
    speculated: int = 0


@dataclass(frozen=True)
class Placement:
    """Counts of subgroups by role. Subgroups neither resident nor moved are updated on the CPU.

    Attributes:
        resident: Subgroups whose state never leaves the device.
        moved: Subgroups whose state is fetched, updated on the device and flushed.
        slots: How many moved subgroups are on the device at once.
        early: How many of the first moved subgroups are fetched before the update.
        late: How many of the last moved subgroups are flushed at the start of the next iteration.
        round_trip_gradients: How many gradients, those of the last moved subgroups, are copied down and back up even
            if there is memory to keep them.
        interleave_cpu_gpu: Without clipping: whether the CPU's subgroups alternate with the GPU's in the order of the
            backward. Otherwise they come first. Where updates may end in the next forward: whether the two alternate
            in its order. Otherwise the GPU's come first.
        cpu_share: The share of the CPU's update rate that is used.
        speculated: Where updates may run in the backward: how many of the last subgroups of the CPU do.
        moved_late: Where updates may end in the next forward: whether those of moved subgroups do.
    """

    resident: int
    moved: int
    slots: int
    early: int = 0
    late: int = 0
    round_trip_gradients: int = 0
    interleave_cpu_gpu: bool = True
    cpu_share: float = 1.0
    moved_late: bool = True
    speculated: int = 0

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
            moved = 0
        speculated = min(max(self.speculated, 0), count - resident - moved)
        if not slots:
            return Placement(resident, 0, 0, speculated=speculated)
        early = min(max(self.early, 0), slots)
        late = min(max(self.late, 0), slots, fit_at_start - resident)
        round_trips = min(max(self.round_trip_gradients, 0), resident + moved)
        return replace(
            self,
            resident=resident,
            moved=moved,
            slots=slots,
            early=early,
            late=late,
            round_trip_gradients=round_trips,
            speculated=speculated,
        )

    def changed(self, change: PlacementChange, times: int = 1) -> Placement:
        """Return the placement after so many times a change. Its counts may be out of range (see `clamped`)."""
        return replace(
            self,
            resident=self.resident + times * change.resident,
            moved=self.moved + times * change.moved,
            slots=self.slots + times * change.slots,
            early=self.early + times * change.early,
            late=self.late + times * change.late,
            round_trip_gradients=self.round_trip_gradients + times * change.round_trip_gradients,
            speculated=self.speculated + times * change.speculated,
        )

    def split(self, factor: int, buffers: int) -> Placement:
        """Return the placement for subgroups that were merged, `factor` into one.

        Args:
            factor: How many subgroups were merged into one.
            buffers: So many slots hold merged subgroups in the memory of single ones.
        """
        early, late = factor * self.early, factor * self.late
        slots = min(self.slots, buffers) + factor * max(0, self.slots - buffers)
        return replace(
            self,
            resident=factor * self.resident,
            moved=factor * self.moved,
            slots=max(slots, early, late),
            early=early,
            late=late,
            round_trip_gradients=factor * self.round_trip_gradients,
            speculated=factor * self.speculated,
        )

    def assignment(self, workload: Workload, ranking: Sequence[int], by_need: bool = False) -> Assignment:
        """Return the assignment in which the first subgroups of a ranking are resident.

        Where all gradients are needed first, the next ones are moved. Otherwise both kinds follow the backward.

        Args:
            workload: The workload.
            ranking: All subgroups.
            by_need: Whether updates are in the order in which the next forward needs them.
        """
        resident, offloaded = ranking[: self.resident], ranking[self.resident :]
        if by_need:
            moved, on_cpu = self._in_forward_order(workload, sorted(offloaded))
        elif workload.needs_all_gradients:
            moved = list(offloaded[: self.moved])
            # The upload of the last update comes after it, so the smallest one is last.
            on_cpu = sorted(offloaded[self.moved :], key=lambda subgroup: -workload.subgroups[subgroup])
        else:
            moved, on_cpu = self._in_backward_order(sorted(offloaded, reverse=True))
        on_gpu = [*resident, *moved]
        return Assignment(
            on_cpu=tuple(on_cpu),
            moved=tuple(moved),
            resident=tuple(resident),
            early=frozenset(moved[: self.early]),
            late=frozenset(moved[len(moved) - self.late :]),
            round_trips=frozenset(on_gpu[len(on_gpu) - self.round_trip_gradients :]),
            slots=max(1, self.slots),
            cpu_share=self.cpu_share,
            moved_late=self.moved_late,
            speculated=self.speculated,
        )

    def _in_forward_order(self, workload: Workload, offloaded: list[int]) -> tuple[list[int], list[int]]:
        """Return the moved subgroups and those of the CPU, of all that are offloaded, in the order of the forward.

        Moved subgroups wait for the flushes of those before them, so without clipping they follow the backward.
        """
        if not workload.needs_all_gradients:
            moved, on_cpu = self._in_backward_order(offloaded[::-1])
            return moved, on_cpu[::-1]
        moved = self._spread(offloaded) if self.interleave_cpu_gpu else offloaded[: self.moved]
        return moved, sorted(set(offloaded) - set(moved))

    def _in_backward_order(self, offloaded: list[int]) -> tuple[list[int], list[int]]:
        """Return the moved subgroups and those of the CPU, of all that are offloaded, in the order of the backward."""
        if not self.interleave_cpu_gpu:
            on_cpu = len(offloaded) - self.moved
            return offloaded[on_cpu:], offloaded[:on_cpu]
        # Both kinds have work from the first gradient on.
        moved = self._spread(offloaded)
        return moved, sorted(set(offloaded) - set(moved), reverse=True)

    def _spread(self, offloaded: list[int]) -> list[int]:
        """Return as many subgroups as are moved, evenly spaced among those that are offloaded."""
        spacing = len(offloaded) / self.moved if self.moved else 0.0
        return [offloaded[int(spacing * number + spacing / 2)] for number in range(self.moved)]
