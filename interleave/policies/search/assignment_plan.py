"""The plan of an assignment: its operations, and the waiting that keeps it within the
free device memory."""

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import cache

from ebbtide import seams
from ebbtide.interleave.model.operations import NO_OVERLAP, Overlap
from ebbtide.interleave.model.plan import STEP, UPDATE, Plan, gradient_ready_points
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies.plan_builder import PlanBuilder
from ebbtide.interleave.policies.search.assignment import (
    Assignment,
    FreeMemory,
    FreePoints,
)


def plan_of(
    workload: Workload,
    memory: FreeMemory,
    assignment: Assignment,
    text: str,
    overlap: Overlap,
) -> Plan:
    """Make the plan of an assignment, not validated: the search checks its result only.

    Subgroups that must be flushed should come before those that stay, in the order of
    the moved ones."""
    builder = PlanBuilder(text, workload, early=True)
    moved, resident = assignment.moved, assignment.resident
    kept = [
        subgroup
        for subgroup in (*resident, *moved)
        if subgroup not in assignment.round_trips
    ]
    if workload.needs_all_gradients:
        kept = memory.gradients_that_fit(resident, kept, moved, assignment.slots)
    flushed_later = [subgroup for subgroup in moved if subgroup in assignment.late]
    builder.leave(flushed_later)
    builder.gradients(keep=frozenset(kept))
    if moved:
        returned_bytes = sum(map(builder.returned_gradient_bytes, resident))
        free = memory.points(
            resident, kept, assignment.gradients_in_flight, returned_bytes
        )
        stream = _Stream(builder, assignment, free, frozenset(kept), flushed_later)
    on_cpu = deque(assignment.on_cpu)

    def add_on_cpu(limit: float = float("inf")) -> None:
        while on_cpu and on_cpu[0] < limit:
            builder.on_cpu(on_cpu.popleft())

    if assignment.uploads_first:
        add_on_cpu()
    for subgroup in moved:
        if overlap.forward:
            add_on_cpu(subgroup)
        stream.update(subgroup)
    for subgroup in resident:
        builder.resident(subgroup)
    add_on_cpu()
    plan = builder.plan(validate=False)
    if overlap != NO_OVERLAP:
        plan = _beside_step()(plan, workload, assignment, overlap)
    return replace(plan, cpu_share=assignment.cpu_share) if assignment.on_cpu else plan


@cache
def _beside_step() -> Callable[[Plan, Workload, Assignment, Overlap], Plan]:
    """Return the service, which searches ask for with many plans."""
    beside_step: Callable[[Plan, Workload, Assignment, Overlap], Plan]
    beside_step = seams.service("beside-step")
    return beside_step


class _Stream:
    """Adds the operations of the moved subgroups.

    It counts the memory that they take in the order of the plan. A fetch that finds
    none waits for the flushes of subgroups before it, so the plan keeps within the
    memory however long its operations take. (The flushes at the start of an iteration
    are the exception: they must end before the job needs the memory, which only the
    simulator knows.)
    """

    def __init__(
        self,
        builder: PlanBuilder,
        assignment: Assignment,
        free: FreePoints,
        kept: frozenset[int],
        late: list[int],
    ) -> None:
        self._builder = builder
        self._assignment = assignment
        self._free = free
        self._kept = kept
        workload = builder.workload
        # What a fetch makes room for: the state, and the gradient where that comes back
        # to memory of its own.
        self._fetched_bytes = {
            subgroup: workload.state_bytes * workload.subgroups[subgroup]
            + builder.returned_gradient_bytes(subgroup)
            for subgroup in assignment.moved
        }
        self._grad_bytes = 0.0
        self._follows_gradients = not workload.needs_all_gradients
        self._due = dict.fromkeys(assignment.moved, UPDATE)
        if not workload.needs_all_gradients:
            points = gradient_ready_points(workload)
            self._due = {subgroup: points[subgroup] for subgroup in assignment.moved}
        elif not workload.gradients_held_until_step:
            self._grad_bytes = workload.grad_bytes
        self._used = 0.0
        self._on_device = 0
        # Flushes that have not been waited for, oldest first: the operation, and the
        # bytes freed when it has ended.
        self._flushes: deque[tuple[int, float]] = deque()
        # The last fetch that waits for flushes. Later ones come after it, so they come
        # after those flushes too.
        self._gate: tuple[int, ...] = ()
        # The flushes at the start of the iteration run in this order, so the last one
        # stands for all.
        self._first_flushes = tuple(builder.leaving(subgroup) for subgroup in late[-1:])
        self._fetched: set[int] = set()
        for subgroup in assignment.moved:
            if subgroup in assignment.early and self._on_device < assignment.slots:
                self._fetch_early(subgroup)

    def update(self, subgroup: int) -> None:
        """Add fetch, update and flush of the next moved subgroup."""
        if subgroup not in self._fetched:
            self._fetch(subgroup)
        update = self._builder.update_fetched(subgroup)
        if subgroup not in self._assignment.late:
            gradient = (
                self._grad_bytes * self._builder.sizes[subgroup]
                if subgroup in self._kept
                else 0.0
            )
            self._flushes.append(
                (
                    self._builder.flush(subgroup, update),
                    self._fetched_bytes[subgroup] + gradient,
                )
            )

    def _fetch_early(self, subgroup: int) -> None:
        point = self._free.first_point(self._used + self._fetched_bytes[subgroup])
        if point is not None:
            self._add_fetch(subgroup, self._first_flushes, point)

    def _fetch(self, subgroup: int) -> None:
        after: list[int] = []
        while True:
            point = self._free.first_point(self._used + self._fetched_bytes[subgroup])
            fits = (
                point is not None
                and point <= self._due[subgroup]
                and self._on_device < self._assignment.slots
            )
            if fits or not self._flushes:
                break
            flush, freed = self._flushes.popleft()
            after.append(flush)
            self._used -= freed
            self._on_device -= 1
        if point is None or not self._follows_gradients:
            # Fetches into memory that is free when the update begins start with it,
            # later ones with the step.
            point = STEP if after and not self._follows_gradients else UPDATE
        fetch = self._add_fetch(
            subgroup, (*after, *self._gate, *self._first_flushes), point
        )
        if after:
            self._gate = (fetch,)

    def _add_fetch(self, subgroup: int, after: tuple[int, ...], point: float) -> int:
        self._used += self._fetched_bytes[subgroup]
        self._on_device += 1
        self._fetched.add(subgroup)
        return self._builder.fetch(subgroup, after, point)
