"""Assignments, which say where the state of each subgroup is kept and updated, and in
which order."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from heapq import nlargest
from itertools import accumulate
from typing import Literal, NamedTuple, TypeVar

import numpy as np

from ebbtide.interleave.model.plan import (
    BACKWARD,
    OTHER,
    UPDATE,
    gradient_ready_points,
    point_at,
)
from ebbtide.interleave.model.workload import Workload, value_at

_Size = TypeVar("_Size", float, np.ndarray)
Role = Literal["cpu", "resident", "streamed", "early", "late", "parked"]
ROLES: tuple[Role, ...] = ("cpu", "resident", "streamed", "early", "late", "parked")
# Shares of the CPU's update rate that the search considers, and factors of the share
# that it has.
CPU_SHARES = (1.0, 0.75, 0.5, 0.375, 0.25, 0.125)
_NEAR_FACTORS = (0.84, 0.92, 1.09, 1.19)
_LEAST_CPU_SHARE = 0.05
# Half of the bytes, and the same share, by which a schedule may exceed the free memory
# (`Schedule.fits_device`).
_TOLERANCE, _TOLERANCE_BYTES = 1e-9, 0.5
# A step function of the point of the iteration: points, and the bytes from each of them
# on.
_PointSteps = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Assignment:
    """The roles of all subgroups, and the orders of their updates."""

    on_cpu: tuple[int, ...]  # Subgroups that the CPU updates, in this order.
    # Subgroups whose state is fetched, updated on the GPU and flushed, in the order of
    # their updates.
    moved: tuple[int, ...]
    # Subgroups whose state never leaves the device, in the order of their updates.
    resident: tuple[int, ...]
    # Moved subgroups that are fetched before the update, as soon as there is memory for
    # all of them.
    early: frozenset[int] = frozenset()
    # Moved subgroups that are flushed at the start of the next iteration. Early and
    # late ones are parked: their state leaves the device for the forward only.
    late: frozenset[int] = frozenset()
    # Subgroups of the GPU whose gradients are copied down and back up, even if there is
    # memory for them.
    round_trips: frozenset[int] = frozenset()
    slots: int = 1  # How many moved subgroups are on the device at once, at most.
    # Without clipping: for how many kept gradients memory is set aside at a time. The
    # simulator tells whether that is enough.
    gradients_in_flight: int = 2
    # Whether uploads of updated parameters come before fetches on the link, if both are
    # ready. Otherwise they come after them; where updates may end in the next forward,
    # both are in its order.
    uploads_first: bool = True
    # The share of the CPU's update rate that is used (see `Plan`).
    cpu_share: float = 1.0
    # Where updates may end in the next forward: whether the updates of moved subgroups
    # do.
    moved_late: bool = True
    # Where updates may run in the backward: how many of the last subgroups of the CPU
    # do.
    speculated: int = 0

    def with_role(
        self, subgroup: int, role: Role, sort_key: Callable[[int], tuple[bool, int]]
    ) -> Assignment:
        """Return the assignment with another role of a subgroup.

        `sort_key` gives its place among the others of its kind."""

        def place(subgroups: tuple[int, ...], belongs: bool) -> tuple[int, ...]:
            others = [other for other in subgroups if other != subgroup]
            if belongs:
                own_key = sort_key(subgroup)
                others.insert(
                    sum([sort_key(other) < own_key for other in others]), subgroup
                )
            return tuple(others)

        single = frozenset({subgroup})
        early = (
            self.early | single if role in ("early", "parked") else self.early - single
        )
        late = self.late | single if role in ("late", "parked") else self.late - single
        return replace(
            self,
            on_cpu=place(self.on_cpu, role == "cpu"),
            moved=place(self.moved, role not in ("cpu", "resident")),
            resident=place(self.resident, role == "resident"),
            early=early,
            late=late,
            round_trips=self.round_trips - single
            if role == "cpu"
            else self.round_trips,
            slots=max(1, self.slots, len(early), len(late)),
        )

    def swapped(self, one: int, other: int) -> Assignment:
        """Return the assignment in which two subgroups have changed places."""
        exchange = {one: other, other: one}

        def renamed(subgroups: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(exchange.get(subgroup, subgroup) for subgroup in subgroups)

        return replace(
            self,
            on_cpu=renamed(self.on_cpu),
            moved=renamed(self.moved),
            resident=renamed(self.resident),
            early=frozenset(renamed(tuple(self.early))),
            late=frozenset(renamed(tuple(self.late))),
            round_trips=frozenset(renamed(tuple(self.round_trips))),
        )


def other_cpu_shares(share: float) -> tuple[float, ...]:
    """Return shares of the CPU's update rate to try in place of one.

    Some are of the whole range, and some near the given share.
    """
    near = (min(max(share * factor, _LEAST_CPU_SHARE), 1.0) for factor in _NEAR_FACTORS)
    return (*CPU_SHARES, *near)


class FreePoints(NamedTuple):
    """Bytes that stay free from each point of the iteration to the update's end."""

    points: list[float]
    sizes: list[float]

    def first_point(self, needed: float) -> float | None:
        """Return the first point from which on `needed` bytes stay free.

        Return None if there is none.
        """
        index = bisect_left(self.sizes, needed)
        return self.points[index] if index < len(self.points) else None


class FreeMemory:
    """The free device memory of a workload, whose `gpu_free` must be known.

    Attributes:
        always: Bytes that are free all the time.
        at_start: Bytes that are free when the iteration begins.
    """

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        # Without those that are replaced at the time at which they begin.
        steps = tuple(dict(workload.gpu_free or ((0.0, 0.0),)).items())
        free = [size for _, size in steps]
        self.always, self.at_start, self._most = min(free), free[0], max(free)
        in_update = [
            value_at(steps, workload.compute_s),
            *(size for time, size in steps if time > workload.compute_s),
        ]
        self._in_update = min(in_update)
        before = [
            (point_at(workload, time), size)
            for time, size in steps
            if time < workload.compute_s
        ]
        points, sizes = zip(*before, (UPDATE, self._in_update), strict=True)
        self._steps: _PointSteps = np.array(points), np.array(sizes)
        ready_points = gradient_ready_points(workload)
        # When the backward starts to compute a gradient, that gradient takes its
        # memory, if it is not there already.
        starts = (
            [OTHER] * len(ready_points)
            if workload.accumulates
            else [*ready_points[1:], BACKWARD]
        )
        self._gradient_starts = np.array(starts)
        self._gradient_bytes = workload.grad_bytes * np.array(
            workload.subgroups, dtype=float
        )
        begin = workload.kept_gradients_begin_s
        edges = [time for time, _ in steps if begin < time < workload.compute_s] + [
            workload.compute_s
        ]
        # The free bytes of each piece of that time in which they are constant, and the
        # bytes of each gradient in it.
        self._backward_free = np.array(
            [value_at(steps, start) for start in [begin, *edges[:-1]]]
        )
        ends = np.array([*(point_at(workload, end) for end in edges), np.inf])
        self._bytes_in_piece = np.where(
            self._gradient_starts[:, None] < ends, self._gradient_bytes[:, None], 0.0
        )

    def state_bytes(self, subgroups: Collection[int]) -> float:
        """Return the bytes of the state of some subgroups."""
        return self._workload.state_bytes * sum(
            map(self._workload.subgroups.__getitem__, subgroups)
        )

    def holds(self, assignment: Assignment) -> bool:
        """Return whether the state of an assignment fits.

        Only what does not depend on time is checked.
        """
        resident = self.state_bytes(assignment.resident)
        at_start = resident + self.state_bytes(assignment.late)
        sizes = self._workload.subgroups
        largest = self._workload.state_bytes * max(
            map(sizes.__getitem__, assignment.moved), default=0
        )
        fits = resident <= _with_tolerance(self.always) and at_start <= _with_tolerance(
            self.at_start
        )
        return fits and max(at_start, resident + largest) <= _with_tolerance(self._most)

    def points(
        self,
        resident: Sequence[int],
        kept: Sequence[int],
        gradients_in_flight: int,
        returned_bytes: float,
    ) -> FreePoints:
        """Return what resident state and kept gradients leave for moved state.

        Args:
            kept: Subgroups whose gradients stay on the device until their update.
            gradients_in_flight: How many of them are on the device at once, if each
                update follows its gradient.
            returned_bytes: Gradients of resident subgroups that come back from the host
                to memory of their own.
        """
        resident_bytes = self.state_bytes(resident) + returned_bytes
        (free_points, free), (gradient_points, gradients) = (
            self._steps,
            self._kept_gradient_steps(kept, gradients_in_flight),
        )
        points = np.union1d(free_points, np.maximum(gradient_points, free_points[0]))
        left = free[free_points.searchsorted(points, "right") - 1]
        left = left - gradients[gradient_points.searchsorted(points, "right") - 1]
        left = _with_tolerance(left) - resident_bytes
        return FreePoints(
            points.tolist(), np.minimum.accumulate(left[::-1])[::-1].tolist()
        )

    def gradients_that_fit(
        self,
        resident: Sequence[int],
        candidates: Sequence[int],
        moved: Sequence[int],
        slots: int,
    ) -> list[int]:
        """Return the first candidates whose gradients fit on the device from the
        backward to the update.

        For workloads in which every update needs all gradients. Gradients share the
        free memory with resident state and the largest moved subgroups. Candidates are
        in the order of preference; `slots` moved subgroups are on the device at
        once.
        """
        workload = self._workload
        if workload.gradients_held_until_step:
            return list(candidates)
        sizes = workload.subgroups
        resident_bytes = self.state_bytes(resident)
        # Gradients that do not stay come back.
        returned_bytes = workload.returned_gradient_bytes
        fetched_bytes = workload.state_bytes + returned_bytes
        slot_bytes = fetched_bytes * sum(
            nlargest(slots, (sizes[subgroup] for subgroup in moved))
        )
        slot_bytes += returned_bytes * sum(map(sizes.__getitem__, resident))
        limits = (
            np.append(self._backward_free, self._in_update - slot_bytes)
            - resident_bytes
        )
        too_many = (self._bytes_in_piece[list(candidates)].cumsum(axis=0) > limits).any(
            axis=1
        )
        return list(
            candidates[: int(too_many.argmax())] if too_many.any() else candidates
        )

    def _kept_gradient_steps(self, kept: Sequence[int], in_flight: int) -> _PointSteps:
        """Return the bytes of kept gradients on the device, from when the backward
        starts to compute them."""
        points, sizes = np.array([OTHER]), np.array([0.0])
        if self._workload.gradients_held_until_step or not kept:
            return points, sizes
        order = sorted(kept, reverse=True)
        if not self._workload.needs_all_gradients:
            most = self._gradient_bytes[order].max() * min(len(kept), in_flight)
            return np.append(points, BACKWARD), np.append(sizes, most)
        return np.append(points, self._gradient_starts[order]), np.append(
            sizes, self._gradient_bytes[order].cumsum()
        )


def _with_tolerance(size: _Size) -> _Size:
    result: _Size = size + _TOLERANCE * abs(size) + _TOLERANCE_BYTES
    return result


def subgroups_that_fit(
    sizes: Sequence[int], state_bytes: float, free_bytes: float
) -> int:
    """Return how many subgroups, counted from the first, have state that fits into this
    much memory."""
    limit = free_bytes / state_bytes * (1 + _TOLERANCE)
    return sum(total <= limit for total in accumulate(sizes))
