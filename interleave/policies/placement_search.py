"""The search for the fastest placement, by simulating the plans of neighbouring ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from ebbtide.interleave.model.plan import Plan
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies.capacity import subgroups_that_fit
from ebbtide.interleave.policies.placement import Placement, PlacementChange, plan_of
from ebbtide.interleave.simulation.bound import optimal_shares
from ebbtide.interleave.simulation.simulator import simulate
from ebbtide.machines.machine import Machine

_INFINITE = float("inf")
# One subgroup is fetched, one is updated, one is flushed.
_SLOTS = (1, 2, 3)
# Seconds added to the cost of plans that do not fit into host memory.
_HOST_MEMORY_PENALTY_S = 1e6
# Weight of copy time in the cost: of plans that take equally long, the one that moves less wins.
_MOVED_WEIGHT = 1e-7
# Changes that the search tries in both directions: along each count, from one count to another, and counts that have to
# grow together.
_CHANGES = (
    PlacementChange(moved=1),
    PlacementChange(resident=1, moved=-1),
    PlacementChange(resident=1),
    PlacementChange(late=1),
    PlacementChange(early=1),
    PlacementChange(early=1, late=1),
    PlacementChange(slots=1),
    PlacementChange(slots=1, early=1),
    PlacementChange(slots=1, late=1),
    PlacementChange(slots=1, early=1, late=1),
    PlacementChange(moved=1, slots=1, early=1, late=1),
    PlacementChange(resident=1, slots=-1),
    PlacementChange(resident=1, moved=-1, slots=-1, early=-1, late=-1),
    PlacementChange(round_trip_gradients=1),
    PlacementChange(slots=1, early=1, round_trip_gradients=1),
)
# Changes that reduce device memory if they are undone: fewer residents, fewer slots, both.
_MEMORY_CHANGES = (
    PlacementChange(resident=1),
    PlacementChange(slots=1, early=1, late=1),
    PlacementChange(resident=1, slots=1, early=1, late=1),
)
_PARKED_TO_RESIDENT = PlacementChange(resident=1, moved=-1, slots=-1, early=-1, late=-1)


class PlacementSearch:
    """Compares placements by simulating them. A plan that exceeds the free device memory has infinite cost.

    Attributes:
        fit_in_update: How many subgroups have state that fits on the device in the update.
    """

    def __init__(self, workload: Workload, machine: Machine, text: str) -> None:
        self._workload = workload
        self._machine = machine
        self._text = text
        self._costs: dict[Placement, float] = {}
        self._link_bytes_per_s = (machine.h2d_bytes_per_s or 1.0) + (machine.d2h_bytes_per_s or 1.0)
        self.fit_in_update = subgroups_that_fit(workload, workload.free_at(workload.compute_s))
        self._fit_at_start = subgroups_that_fit(workload, workload.free_at(0.0))

    def clamp(self, placement: Placement) -> Placement:
        """Return the nearest placement that is possible."""
        clamped = placement.clamped(len(self._workload.subgroups), self.fit_in_update, self._fit_at_start)
        return replace(clamped, interleave_cpu_gpu=False) if self._workload.needs_all_gradients else clamped

    def plan(self, placement: Placement) -> Plan:
        """Make the plan of a placement."""
        return plan_of(self._workload, placement, self._text)

    def cost(self, placement: Placement) -> float:
        """Return the cost of a placement: seconds of its iteration, plus a little for the bytes that it moves."""
        if placement not in self._costs:
            plan = self.plan(placement)
            moved_bytes = sum(op.nbytes for op in plan.ops)
            self._costs[placement] = self.cost_of_plan(plan) + _MOVED_WEIGHT * moved_bytes / self._link_bytes_per_s
        return self._costs[placement]

    def cost_of_plan(self, plan: Plan) -> float:
        """Return the seconds of a plan's iteration, infinite if it does not fit into the free device memory."""
        schedule = simulate(plan, self._workload, self._machine)
        if not schedule.fits_device(None):
            return _INFINITE
        host = self._machine.host_memory_bytes
        # If no plan fits into host memory, the fastest is still the one to show.
        exceeds_host = host is not None and schedule.host_bytes() > host
        return schedule.iteration_s + (_HOST_MEMORY_PENALTY_S if exceeds_host else 0.0)

    def sort_key(self, placement: Placement) -> tuple[float, str]:
        """Return a key to sort placements by: the cost, and a fixed order among equal costs."""
        return self.cost(placement), repr(placement)

    def best_of(self, placements: Iterable[Placement]) -> Placement:
        """Return the cheapest placement, each clamped to what is possible."""
        return min(map(self.clamp, placements), key=self.cost)

    def seeds(self) -> list[Placement]:
        """Return placements to start from, cheapest first: the bound's own solutions, rounded, and plain streaming."""
        candidates = {self.clamp(seed) for seed in _seeds(self._workload, self._machine, self.fit_in_update)}
        return sorted(candidates, key=self.sort_key)

    def shrink_to_fit(self, placement: Placement, factor: int) -> Placement:
        """Reduce what stays on the device until the placement fits.

        Args:
            placement: A placement that fits if neighbouring subgroups are merged.
            factor: How many subgroups were merged into one.
        """
        for reduction in (0, 1, factor // 2, factor, 2 * factor, 4 * factor):
            best = self.best_of(placement.changed(change, -reduction) for change in _MEMORY_CHANGES)
            if self.cost(best) < _INFINITE:
                return best
        return Placement(0, 0, 0)

    def improve(self, start: Placement, step: int | None = None, max_plans: int | None = None) -> Placement:
        """Improve a placement by steps that are halved when none of them helps.

        Args:
            start: The placement to start from.
            step: Size of the first steps; None for an eighth of the subgroups.
            max_plans: How many plans to simulate at most; None for no limit.
        """
        step = step or max(1, len(self._workload.subgroups) // 8)
        limit = _INFINITE if max_plans is None else max_plans + len(self._costs)
        best = start
        while step and len(self._costs) < limit:
            before = best
            for change in _CHANGES:
                for sign in (1, -1):
                    # As far as it helps.
                    while len(self._costs) < limit:
                        candidate = self.clamp(best.changed(change, sign * step))
                        if self.cost(candidate) >= self.cost(best) * (1 - 1e-9):
                            break
                        best = candidate
            opposite_gradients = replace(best, round_trip_gradients=best.moved - best.round_trip_gradients)
            opposite_order = replace(best, interleave_cpu_gpu=not best.interleave_cpu_gpu)
            best = self.best_of([best, opposite_order, opposite_gradients])
            if best == before:
                step //= 2
        return best


def _seeds(workload: Workload, machine: Machine, fit_in_update: int) -> Iterator[Placement]:
    """Yield placements to start from, which may have to be clamped."""
    count = len(workload.subgroups)
    always_fit = subgroups_that_fit(workload, workload.min_free_bytes)
    for whole_subgroups in (False, True):
        shares = optimal_shares(workload, machine, whole_subgroups)
        resident, early, late = (round(share * count) for share in (shares.resident, shares.early, shares.late))
        moved = count - resident - round(shares.on_cpu * count)
        for more_resident in {0, always_fit // 2, always_fit}:
            # State that the bound parks may as well stay where there is always memory.
            for fewer_late in {0, 1, 2, late // 2}:
                seed = Placement(resident, moved, max(early, late), early, late - fewer_late)
                yield seed.changed(_PARKED_TO_RESIDENT, more_resident)
                for slots in _SLOTS:
                    # Slots need memory too.
                    limited = min(resident + more_resident, fit_in_update - slots)
                    streamed = count - limited - round(shares.on_cpu * count)
                    yield Placement(limited, streamed, slots, slots, slots - fewer_late)
    for moved in range(0, count + 1, max(1, count // 8)):
        for slots in _SLOTS:
            for round_trips in {0, 0 if workload.needs_all_gradients else moved}:
                yield Placement(0, moved, slots, 0, 0, round_trips)
                yield Placement(0, moved, slots, slots, slots, round_trips)
