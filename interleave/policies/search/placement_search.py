"""The search over placements: assignments given by a few counts of subgroups by role,
which are changed step by step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from operator import add
from typing import NamedTuple

from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies.search.assignment import (
    Assignment,
    other_cpu_shares,
    subgroups_that_fit,
)
from ebbtide.interleave.policies.search.plan_costs import INFINITE, PlanCosts
from ebbtide.interleave.simulation.bound import OptimalShares


class PlacementChange(NamedTuple):
    """A change of the counts of a `Placement`, by field."""

    resident: int = 0
    moved: int = 0
    slots: int = 0
    early: int = 0
    late: int = 0
    round_trip_gradients: int = 0
    speculated: int = 0


class Placement(NamedTuple):
    """Counts of subgroups by role, see `Assignment`. Subgroups neither resident nor
    moved are updated on the CPU.

    The counts that a `PlacementChange` changes come first."""

    resident: int
    moved: int
    slots: int  # How many moved subgroups are on the device at once.
    # How many of the first moved subgroups are fetched before the update.
    early: int = 0
    # How many of the last moved subgroups are flushed at the start of the next
    # iteration.
    late: int = 0
    # How many gradients, of the last moved subgroups, are copied down and back up even
    # if there is memory to keep them.
    round_trip_gradients: int = 0
    speculated: int = 0
    # Without clipping: whether the CPU's subgroups alternate with the GPU's in the
    # order of the backward. Otherwise they come first. Where updates may end in the
    # next forward: whether the two alternate in its order. Otherwise the GPU's come
    # first.
    interleave_cpu_gpu: bool = True
    cpu_share: float = 1.0
    moved_late: bool = True

    def clamped(self, count: int, fit_in_update: int, fit_at_start: int) -> Placement:
        """Return the nearest placement that is possible.

        So many subgroups have state that fits on the device in the update, and when the
        iteration starts."""
        resident = min(max(self.resident, 0), count, fit_in_update, fit_at_start)
        moved = min(max(self.moved, 0), count - resident)
        slots = min(max(self.slots, 1), moved, fit_in_update - resident)
        if not slots:
            speculated = min(max(self.speculated, 0), count - resident)
            return Placement(
                resident, 0, 0, speculated=speculated, cpu_share=self.cpu_share
            )
        return self._replace(
            resident=resident,
            moved=moved,
            slots=slots,
            early=min(max(self.early, 0), slots),
            late=min(max(self.late, 0), slots, fit_at_start - resident),
            round_trip_gradients=min(
                max(self.round_trip_gradients, 0), resident + moved
            ),
            speculated=min(max(self.speculated, 0), count - resident - moved),
        )

    def changed(self, change: PlacementChange, times: int = 1) -> Placement:
        """Return the placement after a change is applied `times` times.

        Its counts may be out of range (see `clamped`).
        """
        return Placement(
            *map(add, self, (times * step for step in change)), *self[len(change) :]
        )

    def split(self, factor: int, buffers: int) -> Placement:
        """Return the placement for subgroups that were merged, `factor` into one.

        So many slots (`buffers`) hold merged subgroups in the memory of single ones."""
        counts = {
            name: factor * getattr(self, name) for name in PlacementChange._fields
        }
        slots = min(self.slots, buffers) + factor * max(0, self.slots - buffers)
        return self._replace(
            **counts | {"slots": max(slots, counts["early"], counts["late"])}
        )

    def assignment(
        self, workload: Workload, ranking: Sequence[int], by_need: bool = False
    ) -> Assignment:
        """Return the assignment in which the first subgroups of a ranking are resident.

        Where all gradients are needed first, the next ones are moved. Otherwise both
        kinds follow the backward. With `by_need` updates are in the order in which the
        next forward needs them."""
        resident, offloaded = ranking[: self.resident], ranking[self.resident :]
        if by_need:
            moved, on_cpu = self._in_forward_order(workload, sorted(offloaded))
        elif workload.needs_all_gradients:
            moved = list(offloaded[: self.moved])
            # The upload of the last update comes after it, so the smallest one is last.
            on_cpu = sorted(
                offloaded[self.moved :],
                key=lambda subgroup: -workload.subgroups[subgroup],
            )
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
            uploads_first=not by_need,
            cpu_share=self.cpu_share,
            moved_late=self.moved_late,
            speculated=self.speculated,
        )

    def _in_forward_order(
        self, workload: Workload, offloaded: list[int]
    ) -> tuple[list[int], list[int]]:
        """Return the moved subgroups and the CPU's, in the order of the forward.

        Together they are all that are offloaded.

        Moved subgroups wait for the flushes of those before them, so without clipping
        they follow the backward."""
        if not workload.needs_all_gradients:
            moved, on_cpu = self._in_backward_order(offloaded[::-1])
            return moved, on_cpu[::-1]
        moved = (
            self._spread(offloaded)
            if self.interleave_cpu_gpu
            else offloaded[: self.moved]
        )
        return moved, sorted(set(offloaded) - set(moved))

    def _in_backward_order(self, offloaded: list[int]) -> tuple[list[int], list[int]]:
        """Return the moved subgroups and the CPU's, in the order of the backward.

        Together they are all that are offloaded.
        """
        if not self.interleave_cpu_gpu:
            on_cpu = len(offloaded) - self.moved
            return offloaded[on_cpu:], offloaded[:on_cpu]
        # Both kinds have work from the first gradient on.
        moved = self._spread(offloaded)
        return moved, sorted(set(offloaded) - set(moved), reverse=True)

    def _spread(self, offloaded: list[int]) -> list[int]:
        """Return as many subgroups as are moved, evenly spaced among the offloaded
        subgroups."""
        spacing = len(offloaded) / self.moved if self.moved else 0.0
        return [
            offloaded[int(spacing * number + spacing / 2)]
            for number in range(self.moved)
        ]


# Shares of the CPU's update rate that the search starts from once more, where it may
# slow copies.
_THROTTLED_STARTS = (0.9, 0.5, 0.25)
# By this factor a step changes the share, while more or fewer subgroups are moved.
_THROTTLE = 0.75
# Placements that are improved at a time: the bound's solution rounds to several that
# are about as good.
STARTS = 3
# This many batches of placements: the placements of one batch often end at the same
# one.
_BATCHES = 3
# One subgroup is fetched, one is updated, one is flushed.
_SLOTS = (1, 2, 3)
# The share of the work that goes into the comparison of placements to start from.
_SEEDS_SHARE = 0.4
# Changes that the search tries in both directions: along each count, from one count to
# another, and counts that have to grow together.
_CHANGES = (
    PlacementChange(moved=1),
    PlacementChange(resident=1, moved=-1),
    PlacementChange(resident=1),
    PlacementChange(resident=1, late=-1),
    PlacementChange(late=1),
    PlacementChange(early=1),
    PlacementChange(slots=1),
    PlacementChange(slots=1, early=1),
    PlacementChange(moved=1, slots=1, early=1, late=1),
    PlacementChange(resident=1, moved=-1, slots=-1, early=-1, late=-1),
    PlacementChange(round_trip_gradients=1),
)
# The same where updates may run in the backward.
_SPECULATION_CHANGES = (
    PlacementChange(speculated=1),
    PlacementChange(moved=-1, speculated=1),
    PlacementChange(resident=-1, speculated=1),
)
# Changes that reduce device memory if they are undone: fewer residents, fewer slots,
# both.
_MEMORY_CHANGES = (
    PlacementChange(resident=1),
    PlacementChange(slots=1, early=1, late=1),
    PlacementChange(resident=1, slots=1, early=1, late=1),
)
_PARKED_TO_RESIDENT = PlacementChange(resident=1, moved=-1, slots=-1, early=-1, late=-1)


class PlacementSearch:
    """Compares the placements of one ranking of the subgroups."""

    def __init__(
        self, costs: PlanCosts, ranking: Sequence[int], target_s: float
    ) -> None:
        self._costs = costs
        self._target_s = target_s
        self._workload = workload = costs.workload
        self._ranking = ranking
        self._step = max(1, len(ranking) // 8)
        sizes = [workload.subgroups[subgroup] for subgroup in ranking]

        def fit(free_bytes: float) -> int:
            return subgroups_that_fit(sizes, workload.state_bytes, free_bytes)

        has_gpu = costs.machine.gpu_update_params_per_s is not None
        self._fit_in_update = (
            fit(workload.free_at(workload.compute_s) or 0.0) if has_gpu else 0
        )
        self._fit_at_start, self._always_fit = (
            fit(costs.memory.at_start),
            fit(costs.memory.always),
        )
        self._changes = (
            (*_CHANGES, *_SPECULATION_CHANGES) if costs.overlap.backward else _CHANGES
        )
        # Costs, or lower bounds of them, of placements, and whether they are exact.
        self._evaluated: dict[Placement, tuple[float, bool]] = {}

    def assignment(self, placement: Placement) -> Assignment:
        """Return the assignment of a placement."""
        return placement.assignment(
            self._workload, self._ranking, self._costs.overlap.forward
        )

    def cost(self, placement: Placement, limit: float = INFINITE) -> float:
        """Return the cost of a placement; see `PlanCosts.cost`."""
        cost, is_exact = self._evaluated.get(placement, (0.0, False))
        if not is_exact and cost < limit:
            cost = self._costs.cost(self.assignment(placement), limit)
            self._evaluated[placement] = cost, cost < limit
        return cost

    def run(self, shares: list[OptimalShares]) -> list[Placement]:
        """Return the placements that the search ends with, cheapest first.

        It starts from the solutions of the bound, and from the best of these with other
        orders."""
        return self._race_variants(self._race_batches(shares))

    def refine(
        self,
        placements: Iterable[Placement],
        factor: int,
        buffers: int,
    ) -> list[Placement]:
        """Return where races end from placements of merged subgroups, cheapest first.

        See `Placement.split`. Starts from the bound end no better here: merged
        subgroups had them.
        """
        starts = [
            self.shrink_to_fit(placement.split(factor, buffers), factor)
            for placement in placements
        ]
        # Small steps first: merged subgroups differ from single ones.
        left = sorted(
            [
                one
                for start in starts
                for one in self.race([start], max(1, factor // 2))
            ],
            key=self.cost,
        )
        return self._race_variants(left) if self._has_ops else left

    def _race_batches(self, shares: list[OptimalShares]) -> list[Placement]:
        """Return where races from the solutions of the bound end, cheapest first."""
        starts = self.starts(shares)
        batches = [
            starts[first : first + STARTS] for first in range(0, len(starts), STARTS)
        ]
        return sorted(
            [one for batch in batches for one in self.race(batch, self._step)],
            key=self.cost,
        )

    def _race_variants(self, placements: list[Placement]) -> list[Placement]:
        """Return where a race of placements and variants ends, cheapest first.

        Variants are variants of the first placement.
        """
        return self.race([*placements, *self.variants(placements[0])], self._step)

    def starts(self, shares: list[OptimalShares]) -> list[Placement]:
        """Return the cheapest placements to start from, cheapest first: the solutions
        of the bound, with and without whole subgroups, rounded, and plain streaming."""
        plain = [self._clamp(seed) for seed in self._seeds(shares)]
        candidates = list(
            dict.fromkeys(
                self._clamp(seed)
                for start in plain
                for seed in self._speculating(start, shares)
            )
        )
        minimums = {
            seed: self._costs.minimums.of_assignment(self.assignment(seed))
            for seed in candidates
        }
        best: list[tuple[float, Placement]] = []
        ops_after = self._costs.ops_left * (1 - _SEEDS_SHARE)
        for seed in sorted(candidates, key=minimums.__getitem__):
            limit = best[-1][0] if len(best) == _BATCHES * STARTS else INFINITE
            if minimums[seed] >= limit or (self._costs.ops_left <= ops_after and best):
                break
            cost = self.cost(seed, limit)
            if cost < limit:
                best = sorted([*best, (cost, seed)], key=lambda entry: entry[0])[
                    : _BATCHES * STARTS
                ]
        return [seed for _, seed in best]

    def modes(self, placement: Placement) -> list[Placement]:
        """Return the placement with each choice of orders and round trips.

        A choice of round trips is a choice of the gradients that make one.

        The best counts of each differ, so steps from one to another seldom help."""
        on_gpu = placement.resident + placement.moved
        modes = (
            self._clamp(
                placement._replace(
                    interleave_cpu_gpu=alternating,
                    moved_late=late,
                    round_trip_gradients=count,
                )
            )
            for alternating, late, count in product(
                (True, False), (True, False), (0, on_gpu)
            )
        )
        return list(dict.fromkeys(modes))

    def _minimum(self, placement: Placement) -> float:
        return self._costs.minimums.of_assignment(self.assignment(placement))

    def variants(self, placement: Placement) -> list[Placement]:
        """Return a placement with each choice of orders and gradients.

        Where it may help, also on a throttled CPU.
        """
        shares = _THROTTLED_STARTS if self._costs.cpu_slows_copies else ()
        throttled = [placement._replace(cpu_share=cpu_share) for cpu_share in shares]
        return [*self.modes(placement), *throttled]

    def race(self, starts: Iterable[Placement], step: int) -> list[Placement]:
        """Improve placements by steps that are halved.

        Return all that were reached last, cheapest first.

        Of each size of steps as many placements take them as the step is long, but at
        most `STARTS`."""
        placements = sorted(dict.fromkeys(starts), key=self.cost)
        cheapest = self.cost(placements[0])
        placements = [
            one
            for one in placements
            if self._minimum(one) < cheapest or one == placements[0]
        ]
        while step and self.cost(placements[0]) > self._target_s:
            count = min(step, STARTS)
            improved = [
                self.descend(placement, step) for placement in placements[:count]
            ]
            placements = sorted(
                dict.fromkeys((*improved, *placements[count:])), key=self.cost
            )
            step //= 2
        return placements

    def shrink_to_fit(self, placement: Placement, factor: int) -> Placement:
        """Reduce what stays on the device until the placement fits with `factor`
        neighbouring subgroups merged into one."""
        # Residents leave memory for a few slots: without any, nothing could be moved.
        resident = min(
            placement.resident, self._fit_in_update - min(placement.slots, _SLOTS[-1])
        )
        placement = self._clamp(placement._replace(resident=resident))
        # Without clipping, gradients on their way to their updates take memory too,
        # unless they make a round trip.
        round_trips = self._clamp(
            placement._replace(
                round_trip_gradients=placement.resident + placement.moved
            )
        )
        for reduction in (0, 1, factor // 2, factor, 2 * factor, 4 * factor):
            changes = _MEMORY_CHANGES if reduction else _MEMORY_CHANGES[:1]
            for start in (
                (placement,)
                if self._workload.needs_all_gradients
                else (placement, round_trips)
            ):
                smaller = [
                    self._clamp(start.changed(change, -reduction)) for change in changes
                ]
                best = min(dict.fromkeys(smaller), key=self.cost)
                if self.cost(best) < INFINITE:
                    return best
        return Placement(0, 0, 0)

    def descend(self, best: Placement, step: int) -> Placement:
        """Change a placement by steps of one size.

        End when none makes it cheaper, or no work is left.
        """
        before = None
        while best != before and self._has_ops:
            before = best
            for change in self._changes:
                for sign in (1, -1):
                    # As far as it helps, by steps that grow.
                    length = step
                    while (
                        candidate := self._better(
                            best, best.changed(change, sign * length)
                        )
                    ) is not None:
                        best, length = candidate, 2 * length
            for other in self._other_choices(best, step):
                best = self._better(best, other) or best
        return best

    def _other_choices(self, placement: Placement, step: int) -> Iterator[Placement]:
        """Yield a placement with each of its orders changed.

        At last, yield it with other shares of the CPU.
        """
        yield placement._replace(
            round_trip_gradients=placement.moved - placement.round_trip_gradients
        )
        if self._costs.cpu_slows_copies:
            yield placement._replace(
                cpu_share=placement.cpu_share * _THROTTLE, moved=placement.moved + step
            )
            raised = min(1.0, placement.cpu_share / _THROTTLE)
            yield placement._replace(cpu_share=raised, moved=placement.moved - step)
        if step > 1:
            return
        yield placement._replace(interleave_cpu_gpu=not placement.interleave_cpu_gpu)
        yield placement._replace(moved_late=not placement.moved_late)
        if self._costs.overlap.backward:
            on_cpu = (
                len(self._workload.subgroups) - placement.resident - placement.moved
            )
            for eighths in range(9):
                yield placement._replace(speculated=eighths * on_cpu // 8)
        if self._costs.cpu_slows_copies:
            for cpu_share in other_cpu_shares(placement.cpu_share):
                yield placement._replace(cpu_share=cpu_share)

    @property
    def _has_ops(self) -> bool:
        return self._costs.ops_left > 0

    def _better(self, best: Placement, other: Placement) -> Placement | None:
        """Return the nearest possible placement to the other one.

        Return None if it is not cheaper than the best.
        """
        candidate = self._clamp(other)
        if candidate == best or not self._has_ops:
            return None
        limit = self.cost(best) * (1 - 1e-9)
        return candidate if self.cost(candidate, limit) < limit else None

    def _clamp(self, placement: Placement) -> Placement:
        """Return the nearest placement that is possible."""
        clamped = placement.clamped(
            len(self._workload.subgroups), self._fit_in_update, self._fit_at_start
        )
        if not self._costs.overlap.backward or self._workload.copies_at_step:
            clamped = clamped._replace(speculated=0)
        if self._costs.overlap.forward:
            # Late flushes may run at the start of the next iteration anyway.
            return clamped._replace(late=0)
        # Choices that make no difference count as one.
        clamped = clamped._replace(moved_late=True)
        return (
            clamped._replace(interleave_cpu_gpu=False)
            if self._workload.needs_all_gradients
            else clamped
        )

    def _speculating(
        self, seed: Placement, all_shares: list[OptimalShares]
    ) -> Iterator[Placement]:
        """Yield a placement with some choices of how much is speculated."""
        count = len(self._workload.subgroups)
        yield seed
        if self._costs.overlap.backward:
            for shares in all_shares:
                yield seed._replace(speculated=int(shares.speculated * count))
            yield seed._replace(speculated=count)

    def _seeds(self, all_shares: Iterable[OptimalShares]) -> Iterator[Placement]:
        """Yield placements to start from, which may have to be clamped."""
        count = len(self._workload.subgroups)
        for shares in all_shares:
            resident, early, late = (
                round(share * count)
                for share in (shares.resident, shares.early, shares.late)
            )
            moved = count - resident - round(shares.on_cpu * count)
            for more_resident in sorted({0, self._always_fit // 2, self._always_fit}):
                # State that the bound parks may as well stay where there is always
                # memory.
                for fewer_late in sorted({0, 1, 2, late // 2}):
                    seed = Placement(
                        resident, moved, max(early, late), early, late - fewer_late
                    )
                    yield seed.changed(_PARKED_TO_RESIDENT, more_resident)
                    for slots in _SLOTS:
                        # Slots need memory too.
                        limited = min(
                            resident + more_resident, self._fit_in_update - slots
                        )
                        streamed = count - limited - round(shares.on_cpu * count)
                        yield Placement(
                            limited, streamed, slots, slots, slots - fewer_late
                        )
        for moved in range(0, count + 1, max(1, count // 8)):
            for slots in _SLOTS:
                for round_trips in sorted(
                    {0, 0 if self._workload.needs_all_gradients else moved}
                ):
                    yield Placement(0, moved, slots, 0, 0, round_trips)
                    yield Placement(0, moved, slots, slots, slots, round_trips)
