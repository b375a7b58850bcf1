"""An exhaustive search for the fastest plan of a few subgroups, by simulating plans. It
shares no code with `adaptive`.

The space: all assignments of 6 roles to the subgroups. Each is updated on the CPU, is
resident, or is moved; a moved one may be fetched before the update, flushed in the next
iteration, both, or neither. They are tried in the order of a lower bound of their
exposed time, until that exceeds the best plan. Each with the gradients that fit, or
none, kept on the device; with fetches that wait for the flush of the moved subgroup 1,
2 or n places before; and with early fetches from the first moment with memory for all
of them, or from the backward's end. The plans of the best assignments are then refined
by all orders of the updates, all sets of kept gradients, all points of early fetches,
and all single changes and swaps of roles. Late updates are in the order of the forward
instead. Memory is checked on the simulated schedule only.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ebbtide.features.overlap.policy import late
from ebbtide.interleave.model.operations import NO_OVERLAP, Overlap
from ebbtide.interleave.model.plan import (
    OTHER,
    STEP,
    UPDATE,
    Plan,
    gradient_ready_points,
    point_at,
)
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies import PlanBuilder
from ebbtide.interleave.simulation.simulator import simulate
from ebbtide.machines.machine import Machine

CPU, RESIDENT, STREAMED, EARLY, LATE, PARKED = range(6)
FETCHED_EARLY, FLUSHED_LATE = (EARLY, PARKED), (LATE, PARKED)
INFINITE = float("inf")
# The best plans that are refined.
REFINED = 12


class Candidate(NamedTuple):
    """A plan of the space.

    Attributes:
        roles: Role of each subgroup.
        round_trips: Subgroups of the GPU whose gradients are copied down and back up.
        cpu_order: Subgroups of the CPU, in the order of their updates.
        moved_order: Moved subgroups, in the order of their updates.
        distance: A fetch waits for the flush of the moved subgroup so many places
            before.
        early_point: The point at which early fetches begin.
        uploads_first: Whether uploads come before fetches.
    """

    roles: tuple[int, ...]
    round_trips: frozenset[int]
    cpu_order: tuple[int, ...]
    moved_order: tuple[int, ...]
    distance: int
    early_point: float
    uploads_first: bool


def plan_of(
    workload: Workload, candidate: Candidate, overlap: Overlap = NO_OVERLAP
) -> Plan:
    """Return the plan of a candidate, whose updates may run in other phases."""
    roles = candidate.roles
    builder = PlanBuilder("exhaustive", workload, early=True)
    flushed_later = [
        subgroup
        for subgroup in candidate.moved_order
        if roles[subgroup] in FLUSHED_LATE
    ]
    builder.leave(flushed_later)
    builder.gradients(
        keep=frozenset(s for s, role in enumerate(roles) if role != CPU)
        - candidate.round_trips
    )
    first_flushes = tuple(builder.leaving(subgroup) for subgroup in flushed_later)
    ready_points = gradient_ready_points(workload)
    flushes: list[tuple[int, ...]] = []
    early = [
        subgroup
        for subgroup in candidate.moved_order
        if roles[subgroup] in FETCHED_EARLY
    ]
    for subgroup in early:
        builder.fetch(subgroup, first_flushes, candidate.early_point)
    if candidate.uploads_first:
        for subgroup in candidate.cpu_order:
            builder.on_cpu(subgroup)
    for number, subgroup in enumerate(candidate.moved_order):
        if subgroup not in early:
            before = (
                flushes[number - candidate.distance]
                if number >= candidate.distance
                else ()
            )
            point = STEP if before else UPDATE
            if not workload.needs_all_gradients:
                point = min(candidate.early_point, ready_points[subgroup])
            builder.fetch(subgroup, (*first_flushes, *before), point)
        update = builder.update_fetched(subgroup)
        flushes.append(
            () if subgroup in flushed_later else (builder.flush(subgroup, update),)
        )
    for subgroup in reversed(range(len(roles))):
        if roles[subgroup] == RESIDENT:
            builder.resident(subgroup)
    if not candidate.uploads_first:
        for subgroup in candidate.cpu_order:
            builder.on_cpu(subgroup)
    plan = builder.plan(validate=False)
    return (late(plan, workload) if overlap.forward else plan).validate(workload)


class Exhaustive:
    """The search. It ends after so many simulations, and then returns the best plan so
    far."""

    def __init__(
        self,
        workload: Workload,
        machine: Machine,
        max_simulations: int,
        overlap: Overlap = NO_OVERLAP,
    ) -> None:
        self._workload = workload
        self._machine = machine
        self._max_simulations = max_simulations
        self._overlap = overlap
        self._costs: dict[Candidate, float] = {}
        self._best_s = INFINITE

    def least_exposed_s(self) -> float:
        """Return the shortest exposed time of any plan found, s."""
        workload = self._workload
        everything = range(len(workload.subgroups))
        best_of_roles = [self._best_variant(tuple(CPU for _ in everything))]
        for least_s, roles in self._roles_by_bound():
            # The lower bound is that of updates that end with the step.
            if (least_s >= self._best_s and not self._overlap.forward) or len(
                self._costs
            ) > self._max_simulations:
                break
            best_of_roles.append(self._best_variant(roles))
        for candidate in sorted(best_of_roles, key=self._cost)[:REFINED]:
            self._refine(candidate)
        return self._best_s

    def _cost(self, candidate: Candidate) -> float:
        if candidate not in self._costs:
            schedule = simulate(
                plan_of(self._workload, candidate, self._overlap),
                self._workload,
                self._machine,
            )
            fits = schedule.exposed_s > 1.3 * self._best_s or schedule.fits_device(None)
            self._costs[candidate] = schedule.exposed_s if fits else INFINITE
            self._best_s = min(self._best_s, self._costs[candidate])
        return self._costs[candidate]

    def _roles_by_bound(self) -> list[tuple[float, tuple[int, ...]]]:
        """Return (lower bound of the exposed time, roles) of all assignments whose
        state can fit, lowest first."""
        workload, machine = self._workload, self._machine
        sizes = np.array(workload.subgroups, dtype=float)
        roles = np.array(
            list(itertools.product(range(6), repeat=len(sizes))), dtype=np.int8
        )
        cpu, resident, streamed, early, late, parked = (
            state_params(roles, sizes, role) for role in range(6)
        )
        sizes_free = [size for _, size in workload.gpu_free or ()]
        in_update = [size for _, size in workload.gpu_free_from(workload.compute_s)]
        largest = (np.isin(roles, (STREAMED, EARLY, LATE, PARKED)) * sizes).max(axis=1)
        limits = [
            (resident, min(sizes_free)),
            (
                resident + late + parked,
                min(workload.free_at(0.0) or 0.0, max(in_update)),
            ),
            (
                resident
                + np.maximum(largest, (early + parked) * workload.needs_all_gradients),
                max(sizes_free),
            ),
        ]
        fits = np.all(
            [p * workload.state_bytes <= size * (1 + 1e-9) + 1 for p, size in limits],
            axis=0,
        )
        h2d = (machine.h2d_bytes_per_s or 0.0) * (1 - workload.h2d_busy_share)
        d2h = (machine.d2h_bytes_per_s or 0.0) * (1 - workload.d2h_busy_share)
        up = (streamed + late) * workload.state_bytes + cpu * workload.param_bytes
        down = (streamed + early) * workload.state_bytes
        on_cpu_s, on_gpu_s = (
            params / (rate or 1.0)
            for params, rate in (
                (cpu, machine.cpu_update_params_per_s),
                (workload.params - cpu, machine.gpu_update_params_per_s),
            )
        )
        least_s = np.maximum.reduce([on_cpu_s, on_gpu_s, down / d2h])
        if workload.needs_all_gradients:
            least_s = np.maximum(least_s + (machine.step_overhead_s or 0.0), up / h2d)
            traffic = up + down + cpu * workload.cpu_update_bytes
            least_s = np.maximum(
                least_s, traffic / (machine.host_memory_bytes_per_s or INFINITE)
            )
            least_s = np.maximum(
                least_s, (up + down) / (machine.duplex_bytes_per_s or INFINITE)
            )
        else:
            least_s = least_s - workload.backward_s * (1 - sizes[-1] / workload.params)
        order = np.argsort(least_s, kind="stable")
        return [(float(least_s[i]), tuple(roles[i].tolist())) for i in order if fits[i]]

    def _best_variant(self, roles: tuple[int, ...]) -> Candidate:
        workload = self._workload
        count = len(roles)
        subgroups = range(count - 1, -1, -1)
        moved = [subgroup for subgroup in subgroups if roles[subgroup] > RESIDENT]
        on_cpu = [subgroup for subgroup in subgroups if roles[subgroup] == CPU]
        if workload.needs_all_gradients:
            moved.sort(
                key=lambda s: (roles[s] in FLUSHED_LATE, roles[s] not in FETCHED_EARLY)
            )
            on_cpu.sort(key=lambda s: -workload.subgroups[s])
        if self._overlap.forward:
            moved.sort(key=lambda s: (roles[s] in FLUSHED_LATE, s))
            on_cpu.sort()
        points = {UPDATE, self._first_point(roles)} if moved else {UPDATE}
        on_gpu = frozenset(subgroup for subgroup in subgroups if roles[subgroup] != CPU)
        round_trips = {
            self._gradients_without_memory(roles, 1),
            self._gradients_without_memory(roles, 2),
            on_gpu,
        }
        variants = [
            Candidate(
                roles,
                trips,
                tuple(on_cpu),
                tuple(moved),
                distance,
                point,
                uploads_first=False,
            )
            for trips in sorted(round_trips, key=sorted)
            for distance in ((1, 2, count) if len(moved) > 1 else (1,))
            for point in sorted(points)
        ]
        return min(variants, key=self._cost)

    def _first_point(self, roles: tuple[int, ...]) -> float:
        """Return the first point from which on there is memory for resident and early
        state."""
        workload = self._workload
        needed = sum(
            size
            for size, role in zip(workload.subgroups, roles, strict=True)
            if role in (1, 3, 5)
        )
        point = UPDATE
        for time, size in reversed(workload.gpu_free or ()):
            if size * (1 + 1e-9) + 1 < needed * workload.state_bytes:
                break
            point = min(point, point_at(workload, time))
        return point

    def _gradients_without_memory(
        self, roles: tuple[int, ...], slots: int
    ) -> frozenset[int]:
        """Return the gradients that do not fit beside resident and early state, or the
        largest moved subgroups."""
        workload = self._workload
        if not workload.needs_all_gradients:
            return frozenset()
        sizes = workload.subgroups
        params = [
            sum(s for s, role in zip(sizes, roles, strict=True) if role in kinds)
            for kinds in ((1,), (1, 3, 5))
        ]
        largest = sorted(
            (s for s, role in zip(sizes, roles, strict=True) if role > RESIDENT),
            reverse=True,
        )[:slots]
        free = min(size for _, size in workload.gpu_free_from(workload.compute_s))
        free -= workload.state_bytes * max(params[0] + sum(largest), params[1])
        without = set()
        for subgroup in sorted(
            (s for s, role in enumerate(roles) if role != CPU), key=roles.__getitem__
        ):
            needed = workload.grad_bytes * sizes[subgroup]
            if needed <= free:
                free -= needed
            else:
                without.add(subgroup)
        return frozenset(without)

    def _refine(self, start: Candidate) -> None:
        best, limit = start, len(self._costs) + self._max_simulations // 8
        improved = True
        while improved:
            improved = False
            for candidate in list(self._changes(best)):
                if len(self._costs) > limit:
                    return
                if self._cost(candidate) < self._cost(best) * (1 - 1e-9):
                    best, improved = candidate, True

    def _changes(self, candidate: Candidate) -> Iterator[Candidate]:
        workload, count = self._workload, len(candidate.roles)
        on_gpu = [
            subgroup for subgroup, role in enumerate(candidate.roles) if role != CPU
        ]
        for number in range(len(on_gpu) + 1):
            for subgroups in itertools.combinations(on_gpu, number):
                yield candidate._replace(round_trips=frozenset(subgroups))
        yield from (
            candidate._replace(moved_order=order)
            for order in itertools.permutations(candidate.moved_order)
        )
        yield from (
            candidate._replace(cpu_order=order)
            for order in itertools.permutations(candidate.cpu_order)
        )
        times = (point_at(workload, time) for time, _ in workload.gpu_free or ())
        for point in sorted({OTHER, UPDATE, *times, *gradient_ready_points(workload)}):
            yield candidate._replace(early_point=point)
        yield from (
            candidate._replace(distance=distance) for distance in range(1, count + 1)
        )
        yield candidate._replace(uploads_first=not candidate.uploads_first)
        for subgroup, role in itertools.product(range(count), range(6)):
            yield with_roles(candidate, {subgroup: role})
        for one, other in itertools.combinations(range(count), 2):
            yield with_roles(
                candidate, {one: candidate.roles[other], other: candidate.roles[one]}
            )


def state_params(roles: np.ndarray, sizes: np.ndarray, role: int) -> np.ndarray:
    """Return the parameters of the subgroups with a role, for each assignment."""
    result: np.ndarray = (roles == role) @ sizes
    return result


def with_roles(candidate: Candidate, changes: dict[int, int]) -> Candidate:
    """Return the candidate with other roles of some subgroups, which come last in their
    order."""
    roles = tuple(
        changes.get(subgroup, role) for subgroup, role in enumerate(candidate.roles)
    )

    def order(old: tuple[int, ...], on_cpu: bool) -> tuple[int, ...]:
        belong = [
            s
            for s, role in enumerate(roles)
            if (role == CPU if on_cpu else role > RESIDENT)
        ]
        return tuple(
            [s for s in old if s in belong]
            + [s for s in reversed(belong) if s not in old]
        )

    return candidate._replace(
        roles=roles,
        round_trips=frozenset(s for s in candidate.round_trips if roles[s] != CPU),
        cpu_order=order(candidate.cpu_order, on_cpu=True),
        moved_order=order(candidate.moved_order, on_cpu=False),
    )
