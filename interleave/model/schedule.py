"""Schedules: plans with times, predicted by the simulator or measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import fmean
from typing import TypeVar

import numpy as np

from ebbtide.analysis.metrics.device_fit import (
    MemoryNeed,
    fits_beside,
    gradient_starts,
    tightest,
)
from ebbtide.interleave.model.durations import host_traffic
from ebbtide.interleave.model.operations import split_lane
from ebbtide.interleave.model.plan import RESOURCES, STORAGE_RESOURCES, Op, Plan
from ebbtide.interleave.model.workload import LayerMemory, Workload
from ebbtide.machines.machine import Machine
from ebbtide.units import ms_text

# A note lists the lengths of up to this many iterations.
_MOST_LISTED = 4
# A plan that settles is better than one that does not, unless it is slower by this
# factor.
_UNSETTLED_FACTOR = 1e3
Value = TypeVar("Value")


@dataclass(frozen=True)
class MeasuredBytes:
    """Bytes of one iteration, counted where they are allocated and moved, not taken
    from the plan."""

    # Device memory that state and its buffers hold at the end of the iteration.
    device: int
    host: int  # Host memory that state and buffers (of state, of copies) hold.
    storage_read: int  # Bytes read from storage.
    storage_written: int  # Bytes written to storage.


@dataclass(frozen=True, repr=False)
class Schedule:
    """A plan with the times of one iteration, which repeats.

    Late operations (see `Op.holds`) may end in the next iteration: their times then
    exceed the length of this one. Where iterations differ and repeat together
    (`cycle`), phases are their means, and operations are the first iteration's.

    Attributes:
        starts: Start of each operation, seconds from the start of the iteration.
        ends: End of each operation, likewise.
        other_s: Length of the part outside of all phases, seconds, waiting included.
        forward_s: Length of the forward, likewise.
        backward_s: Length of the backward, likewise.
        update_s: Length of the update, likewise. The iteration is the sum of the four.
        measured: Bytes as the executor has counted them; None: simulated.
        cycle: The iterations that differ and repeat together, in order; empty if each
            is as this one.
        settles: Whether iterations repeat. Otherwise `cycle` has the second half of
            those that were simulated.
    """

    plan: Plan
    workload: Workload
    starts: list[float]
    ends: list[float]
    other_s: float
    forward_s: float
    backward_s: float
    update_s: float
    measured: MeasuredBytes | None = None
    cycle: tuple[Schedule, ...] = ()
    settles: bool = True

    @classmethod
    def of_cycle(cls, cycle: Sequence[Schedule], settles: bool = True) -> Schedule:
        """Return the schedule of iterations that repeat together, or of some that do
        not repeat."""
        first = cycle[0]
        if len(cycle) == 1:
            return first
        return replace(
            first,
            other_s=fmean(one.other_s for one in cycle),
            forward_s=fmean(one.forward_s for one in cycle),
            backward_s=fmean(one.backward_s for one in cycle),
            update_s=fmean(one.update_s for one in cycle),
            cycle=tuple(cycle),
            settles=settles,
        )

    def __repr__(self) -> str:
        return (
            f"<Schedule: {self.plan.policy}, {len(self.starts):,} operations, "
            f"iteration {self.iteration_s:.6g} s>"
        )

    @property
    def iteration_s(self) -> float:
        """Length of the iteration, seconds."""
        return self.other_s + self.forward_s + self.backward_s + self.update_s

    @property
    def exposed_s(self) -> float:
        """Seconds that the optimizer adds to the iteration."""
        return max(0.0, self.iteration_s - self.workload.compute_s)

    @property
    def iterations(self) -> tuple[Schedule, ...]:
        """The iterations that repeat, each with its own times."""
        return self.cycle or (self,)

    @property
    def shown(self) -> Schedule:
        """One iteration, to be drawn."""
        return self.iterations[0]

    @property
    def note(self) -> str | None:
        """The lengths of iterations that differ, in words; None if they do not."""
        if not self.cycle:
            return None
        lengths_ms = [1e3 * one.iteration_s for one in self.cycle]
        extent = f"from {ms_text(min(lengths_ms))} to {ms_text(max(lengths_ms))}"
        if not self.settles:
            return f"its iterations do not settle: {extent}"
        if len(lengths_ms) > _MOST_LISTED:
            return f"its iterations repeat every {len(lengths_ms)}: {extent}"
        return f"its iterations alternate: {', '.join(map(ms_text, lengths_ms))}"

    @property
    def rating_s(self) -> float:
        """Seconds by which plans are compared: the iteration, or far more if iterations
        do not settle."""
        return (
            self.iteration_s if self.settles else _UNSETTLED_FACTOR * self.iteration_s
        )

    @property
    def span_s(self) -> float:
        """Seconds until everything repeats."""
        return sum(one.iteration_s for one in self.iterations)

    def in_turn(self) -> Iterator[tuple[float, Schedule]]:
        """Yield the iterations that repeat, with their start.

        The start is in seconds from the start of the first.
        """
        begins = accumulate((one.iteration_s for one in self.iterations), initial=0.0)
        return zip(begins, self.iterations, strict=False)

    def items(self) -> Iterator[tuple[Op, float, float]]:
        """Yield (operation, start s, end s) in the plan's order."""
        return zip(self.plan.ops, self.starts, self.ends, strict=True)

    def moved_bytes(self, direction: str) -> float:
        """Return the bytes moved in a direction.

        The direction is `h2d`, `d2h`, `storage_read` or `storage_write`.
        """
        return sum(
            op.nbytes for op in self.plan.ops if split_lane(op.resource)[0] == direction
        )

    def busy_shares(self) -> dict[str, float]:
        """Return the share of the update phase during which each resource is busy.

        Of storage, it is the busiest path.

        Storage is left out if the plan does not use it."""
        busy: dict[str, float] = {}
        for one in self.iterations:
            begin = one.iteration_s - one.update_s
            for op, start, end in one.items():
                seconds = max(0.0, min(end, one.iteration_s) - max(start, begin))
                busy[op.resource] = busy.get(op.resource, 0.0) + seconds
        update_s = sum(one.update_s for one in self.iterations)
        resources = (
            (*RESOURCES, *STORAGE_RESOURCES) if self.plan.storage_buffers else RESOURCES
        )
        shares: dict[str, float] = dict.fromkeys(resources, 0.0)
        for lane, seconds in busy.items() if update_s > 0 else ():
            resource, _ = split_lane(lane)
            shares[resource] = max(
                shares.get(resource, 0.0), min(1.0, seconds / update_s)
            )
        return shares

    def storage_busy_shares(self) -> list[dict[str, float]]:
        """Return how long each path of the storage reads and writes.

        Times are shares of the iteration.
        """
        lanes = [split_lane(op.resource) for op in self.plan.ops]
        paths = 1 + max(
            (path for name, path in lanes if name in STORAGE_RESOURCES), default=-1
        )
        busy: list[dict[str, float]] = [
            dict.fromkeys(STORAGE_RESOURCES, 0.0) for _ in range(paths)
        ]
        for one in self.iterations if self.span_s > 0 else ():
            for (name, path), start, end in zip(
                lanes, one.starts, one.ends, strict=True
            ):
                if name in STORAGE_RESOURCES:
                    busy[path][name] += (end - start) / self.span_s
        return busy

    def host_traffic_in_update(self) -> float:
        """Return the bytes of host memory traffic during the update.

        CPU updates, casts and copies read and write them.
        """
        total = 0.0
        for one in self.iterations:
            begin, over = one.iteration_s - one.update_s, one.iteration_s
            for op, start, end in one.items():
                within_s = max(0.0, min(end, over) - max(start, begin))
                is_within = start >= begin and end <= over
                total += (
                    1.0 if is_within else within_s / ((end - start) or 1.0)
                ) * host_traffic(op, self.workload)
        return total / len(self.iterations)

    def device_memory_line(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the device memory that the plan uses, as a step function over the
        iterations that repeat.

        It counts resident state, buffers, parked state and kept gradients.

        Returns:
            Times in seconds, and the bytes in use from each of them on.
        """
        changes = self._device_memory_changes()
        times = np.array([time for time, _ in changes])
        sizes = np.cumsum([size for _, size in changes])
        last_of_time = np.append(np.diff(times) > 0, True)
        return times[last_of_time], np.maximum(sizes[last_of_time], 0.0)

    def _device_memory_changes(self) -> list[tuple[float, float]]:
        """Return (time, bytes) by which the device memory of the plan changes.

        The changes are in the order of time.
        """
        sizes = self.workload.subgroups
        parked_bytes = self.workload.state_bytes * sum(
            sizes[subgroup] for subgroup in self.plan.parked
        )
        changes = [(0.0, self.plan.resident_bytes + parked_bytes)]
        for begin, one in self.in_turn():
            changes += [
                (begin + time, size) for time, size in one._changes_of_operations()
            ]
        if self.plan.has_late_operations:
            changes = self._wrapped(changes)
        # At equal times memory is released before it is allocated.
        changes.sort()
        return changes

    def _changes_of_operations(self) -> list[tuple[float, float]]:
        """Return the same of the operations of this iteration, in any order."""
        changes = self._kept_gradient_changes()
        for op, start, end in self.items():
            if op.takes:
                changes.append((start, op.takes))
            if op.gives:
                changes.append((end, -op.gives))
        return changes

    def _wrapped(self, changes: list[tuple[float, float]]) -> list[tuple[float, float]]:
        """Move changes after the end of the repeating iterations to the begin.

        There the iterations before made them.

        What was allocated in an earlier iteration and is released in this one is in use
        from the start."""
        length = self.span_s
        in_use = sum(-size * (time // length) for time, size in changes)
        return [(0.0, in_use), *((time % length, size) for time, size in changes)]

    def _kept_gradient_changes(self) -> list[tuple[float, float]]:
        """Return (time, bytes) of kept gradients, from `gradient_starts` until the
        update has ended."""
        plan = self.plan
        if (
            not plan.kept_gradients
            or plan.has_gradient_buffers
            or self.workload.gradients_held_until_step
        ):
            return []
        begin_s = self.other_s + self.forward_s
        starts = gradient_starts(
            self.workload.subgroups, begin_s, self.backward_s, self.workload.accumulates
        )
        changes = []
        for op, _, end in self.items():
            if op.kind == "update" and op.subgroup in self.plan.kept_gradients:
                size = self.workload.grad_bytes * op.params
                changes += [(starts[op.subgroup], size), (end, -size)]
        return changes

    @property
    def peak_device_bytes(self) -> float:
        """Largest device memory that the plan uses at any time, bytes."""
        return float(self.device_memory_line()[1].max())

    def fits_device(self, gpu_memory_bytes: float | None) -> bool | None:
        """Return whether the plan's device memory fits the free memory at every
        instant.

        Args:
            gpu_memory_bytes: Memory of the whole device. It matters only if the
                workload's free memory is not known.

        Returns:
            None if it is not known.
        """
        if self.workload.missing_bytes > 0:
            return False
        if self.workload.gpu_free is None:
            if self.peak_device_bytes == 0:
                return True
            return (
                False
                if gpu_memory_bytes is not None
                and self.peak_device_bytes > gpu_memory_bytes
                else None
            )
        free = self._stretched(self.workload.gpu_free)
        return fits_beside(self._device_memory_changes(), free, self.span_s)

    def device_need(self, gpu_memory_bytes: float | None) -> MemoryNeed:
        """Return what the plan needs of the device where least is left, by the rules
        and arguments of `fits_device`."""
        if self.workload.missing_bytes > 0:
            return MemoryNeed("device", self.workload.missing_bytes, 0.0)
        if self.workload.gpu_free is None:
            is_known = self.fits_device(gpu_memory_bytes) is not None
            free = gpu_memory_bytes if is_known else None
            return MemoryNeed("device", self.peak_device_bytes, free)
        free_steps = self._stretched(self.workload.gpu_free)
        return tightest(self._device_memory_changes(), free_steps, self.span_s)

    def free_memory_line(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the device memory that the job itself leaves free, as a step function
        over the iterations that repeat.

        Waiting in a phase stretches the workload's own steps in that phase.

        Returns:
            Times in seconds, and the bytes free from each of them on. None if it is not
                known.
        """
        if self.workload.gpu_free is None:
            return None
        times, sizes = zip(*self._stretched(self.workload.gpu_free), strict=True)
        return np.array(times), np.array(sizes)

    def _stretched(
        self, steps: Iterable[tuple[float, Value]]
    ) -> list[tuple[float, Value]]:
        """Return a step function over the iterations that repeat.

        `steps` are of an iteration without waiting.
        """
        times, values = zip(*steps, strict=True)
        return [
            (begin + time, value)
            for begin, one in self.in_turn()
            for time, value in zip(one._stretched_times(times), values, strict=True)
        ]

    def _stretched_times(self, times: Iterable[float]) -> list[float]:
        """Return times of an iteration without waiting, stretched to this one.

        Each phase is as long as in this iteration.
        """
        lengths = (
            (self.workload.other_s, self.other_s),
            (self.workload.forward_s, self.forward_s),
            (self.workload.backward_s, self.backward_s),
        )
        result = []
        for time in times:
            begin = shifted = 0.0
            for length, length_with_waiting in lengths:
                if time < begin + length:
                    shifted += (time - begin) * (length_with_waiting / length)
                    begin = time
                    break
                begin += length
                shifted += length_with_waiting
            result.append(shifted + (time - begin))
        return result

    def layer_memory_line(self) -> tuple[list[float], list[LayerMemory]]:
        """Return the device memory, as a step function, of layers whose weights and
        activations the plan moves."""
        memory = self.workload.layer_memory
        if not memory:
            return [], []
        times, sizes = zip(
            *self._stretched((one.at_s, one) for one in memory), strict=True
        )
        return list(times), list(sizes)

    def peak_job_bytes(self) -> float | None:
        """Return the largest device memory of the layers and of what the plan puts
        there; None without layers."""
        times, memory = self.layer_memory_line()
        if not memory:
            return None
        plan_times, plan_sizes = self.device_memory_line()
        instants = np.union1d(times, plan_times)
        layers = np.array([one.total for one in memory])[
            np.searchsorted(times, instants, "right") - 1
        ]
        return float(
            (
                layers + plan_sizes[np.searchsorted(plan_times, instants, "right") - 1]
            ).max()
        )

    def pinned_bytes(self) -> float:
        """Return the part of the host memory that must be pinned.

        It is the state of subgroups that are fetched or flushed, the buffers of state
        in storage, and the buffers of copies that are not pageable."""
        stored = self.plan.stored
        moved = {
            op.subgroup: op.nbytes
            for op in self.plan.ops
            if op.kind in ("fetch", "flush") and op.subgroup not in stored
        }
        buffers = (
            op.nbytes
            for op in self.plan.ops
            if op.kind in ("gradient down", "upload") and not op.pageable
        )
        return sum(moved.values()) + sum(buffers) + sum(self.plan.storage_buffers)

    def host_bytes(self) -> float:
        """Return the host memory that the plan needs (see `needed_host_bytes`)."""
        return needed_host_bytes(self.plan, self.workload)


def available_host_bytes(workload: Workload, machine: Machine) -> float | None:
    """Return the host memory that a plan may use: the rank's part, or what the job
    leaves; None: not known."""
    limits = (machine.host_memory_bytes, workload.host_free_bytes)
    return min((limit for limit in limits if limit is not None), default=None)


def needed_host_bytes(plan: Plan, workload: Workload) -> float:
    """Return the host memory that a plan needs.

    It is for state that is neither resident nor in storage, a second copy of what is
    updated speculatively (storage writes new versions beside the old), buffers of
    storage and of copies, streamed weights and activations."""
    sizes, stored = workload.subgroups, plan.stored
    elsewhere = plan.resident | stored
    offloaded = sum(
        size for subgroup, size in enumerate(sizes) if subgroup not in elsewhere
    )
    spare = sum(sizes[subgroup] for subgroup in plan.updated_beside - stored)
    layers = plan.layers.host_bytes(workload) if plan.layers is not None else 0.0
    # Parameters that are copied up twice have one buffer.
    copies = {
        (op.kind, op.subgroup): op.nbytes
        for op in plan.ops
        if op.kind in ("gradient down", "upload")
    }
    if workload.master != "fp32":
        # Updates read the parameters, so the new ones are beside them, too.
        copies["spare", -1] = workload.param_bytes * spare
    return (
        workload.state_bytes * (offloaded + spare)
        + sum(plan.storage_buffers)
        + sum(copies.values())
        + layers
    )


def exceeds_host(plan: Plan, workload: Workload, machine: Machine) -> bool:
    """Return whether a plan needs more host memory than is known to be available."""
    available = available_host_bytes(workload, machine)
    return available is not None and needed_host_bytes(plan, workload) > available
