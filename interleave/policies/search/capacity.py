"""The free device memory of a workload: how much state and how many gradients fit, and from when on."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from heapq import nlargest
from itertools import accumulate

from ebbtide.interleave.model.plan import BACKWARD, OTHER, UPDATE, gradient_ready_points, point_at
from ebbtide.interleave.model.workload import FreeMemorySteps, Workload, value_at
from ebbtide.interleave.policies.search.assignment import Assignment

# Half of the bytes, and the same share, by which a schedule may exceed the free memory (`Schedule.fits_device`).
_TOLERANCE, _TOLERANCE_BYTES = 1e-9, 0.5
# Bytes by point of the iteration, a step function: (point, bytes from there on).
_PointSteps = list[tuple[float, float]]


class FreePoints:
    """Bytes that stay free from each point of the iteration to the end of the update."""

    def __init__(self, points: list[float], sizes: list[float]) -> None:
        self._points = points
        self._sizes = sizes

    def first_point(self, needed: float) -> float | None:
        """Return the first point from which on so many bytes stay free, None if there is none."""
        index = bisect_left(self._sizes, needed)
        return self._points[index] if index < len(self._points) else None


class FreeMemory:
    """The free device memory of a workload, whose `gpu_free` must be known.

    Attributes:
        always: Bytes that are free all the time.
        at_start: Bytes that are free when the iteration begins.
    """

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        steps = lasting_steps(workload)
        free = [size for _, size in steps]
        self.always, self.at_start, self._most = min(free), free[0], max(free)
        in_update = [value_at(steps, workload.compute_s), *(size for time, size in steps if time > workload.compute_s)]
        self._in_update = min(in_update)
        self._steps: _PointSteps = [
            (point_at(workload, time), size) for time, size in steps if time < workload.compute_s
        ]
        self._steps.append((UPDATE, self._in_update))
        ready_points = gradient_ready_points(workload)
        # When the backward starts to compute a gradient, that gradient takes its memory, if it is not there already.
        self._gradient_starts = [OTHER] * len(ready_points) if workload.accumulates else [*ready_points[1:], BACKWARD]
        begin = workload.kept_gradients_begin_s
        edges = [time for time, _ in steps if begin < time < workload.compute_s] + [workload.compute_s]
        # Of each piece of that time in which the free memory is constant: its end, and the free bytes.
        self._backward_pieces = [
            (point_at(workload, end), value_at(steps, start))
            for start, end in zip([begin, *edges], edges, strict=False)
        ]

    def state_bytes(self, subgroups: Collection[int]) -> float:
        """Return the bytes of the state of some subgroups."""
        return self._workload.state_bytes * sum(map(self._workload.subgroups.__getitem__, subgroups))

    def holds(self, assignment: Assignment) -> bool:
        """Return whether the state of an assignment fits, as far as that does not depend on time."""
        resident = self.state_bytes(assignment.resident)
        at_start = resident + self.state_bytes(assignment.late)
        sizes = self._workload.subgroups
        largest = self._workload.state_bytes * max(map(sizes.__getitem__, assignment.moved), default=0)
        fits = resident <= _with_tolerance(self.always) and at_start <= _with_tolerance(self.at_start)
        return fits and max(at_start, resident + largest) <= _with_tolerance(self._most)

    def points(
        self, resident: Sequence[int], kept: Sequence[int], gradients_in_flight: int, returned_bytes: float
    ) -> FreePoints:
        """Return what resident state and kept gradients leave for moved state.

        Args:
            resident: Subgroups whose state is resident.
            kept: Subgroups whose gradients stay on the device until their update.
            gradients_in_flight: How many of them are on the device at once, if each update follows its gradient.
            returned_bytes: Gradients of resident subgroups that come back from the host to memory of their own.
        """
        resident_bytes = self.state_bytes(resident) + returned_bytes
        # From the last step to the first: the least of all values from there on.
        free, gradients = self._steps, self._kept_gradient_steps(kept, gradients_in_flight)
        points, sizes = [], []
        least = float("inf")
        index, number = len(free) - 1, len(gradients) - 1
        while index >= 0:
            size = free[index][1] - gradients[number][1]
            least = min(least, _with_tolerance(size) - resident_bytes)
            point = max(free[index][0], gradients[number][0])
            points.append(point)
            sizes.append(least)
            # Whichever begins last is the next to be left; the gradients' first step begins with the iteration.
            if free[index][0] >= point:
                index -= 1
            if gradients[number][0] >= point:
                number = max(number - 1, 0)
        return FreePoints(points[::-1], sizes[::-1])

    def gradients_that_fit(
        self, resident: Sequence[int], candidates: Sequence[int], moved: Sequence[int], slots: int
    ) -> list[int]:
        """Return the first of the candidates whose gradients fit on the device from the backward to the update.

        For workloads in which every update needs all gradients. Gradients share the free memory with resident state
        and the largest moved subgroups.

        Args:
            resident: Subgroups whose state is resident.
            candidates: Subgroups whose gradients should stay, in order of preference.
            moved: Subgroups whose state is moved.
            slots: How many of them are on the device at once.
        """
        workload = self._workload
        if workload.gradients_held_until_step:
            return list(candidates)
        sizes = workload.subgroups
        resident_bytes = self.state_bytes(resident)
        # Gradients that do not stay come back.
        returned_bytes = workload.returned_gradient_bytes
        fetched_bytes = workload.state_bytes + returned_bytes
        slot_bytes = fetched_bytes * sum(nlargest(slots, (sizes[subgroup] for subgroup in moved)))
        slot_bytes += returned_bytes * sum(map(sizes.__getitem__, resident))
        limits = [(end, free - resident_bytes) for end, free in self._backward_pieces]
        limits.append((float("inf"), self._in_update - resident_bytes - slot_bytes))
        totals = [0.0] * len(limits)
        for count, subgroup in enumerate(candidates):
            start, size = self._gradient_starts[subgroup], workload.grad_bytes * sizes[subgroup]
            for number, (end, limit) in enumerate(limits):
                if start < end:
                    totals[number] += size
                    if totals[number] > limit:
                        return list(candidates[:count])
        return list(candidates)

    def _kept_gradient_steps(self, kept: Sequence[int], in_flight: int) -> _PointSteps:
        """Return the bytes of kept gradients on the device, counted from when the backward starts to compute them."""
        workload, steps = self._workload, [(OTHER, 0.0)]
        sizes = workload.subgroups
        if workload.gradients_held_until_step or not kept:
            return steps
        if not workload.needs_all_gradients:
            largest = workload.grad_bytes * max(sizes[subgroup] for subgroup in kept)
            return [*steps, (BACKWARD, largest * min(len(kept), in_flight))]
        total = 0.0
        for subgroup in sorted(kept, reverse=True):
            total += workload.grad_bytes * sizes[subgroup]
            steps.append((self._gradient_starts[subgroup], total))
        return steps


def lasting_steps(workload: Workload) -> FreeMemorySteps:
    """Return the steps of the free memory without those that are replaced at the time at which they begin."""
    steps = workload.gpu_free or ((0.0, 0.0),)
    return tuple(dict(steps).items())


def _with_tolerance(size: float) -> float:
    return size + _TOLERANCE * abs(size) + _TOLERANCE_BYTES


def subgroups_that_fit(sizes: Sequence[int], state_bytes: float, free_bytes: float) -> int:
    """Return how many subgroups, counted from the first, have state that fits into so much memory."""
    limit = free_bytes / state_bytes * (1 + _TOLERANCE)
    return sum(total <= limit for total in accumulate(sizes))
