"""A plan with times: predicted by the simulator, or measured by an executor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ebbtide.interleave.model.plan import RESOURCES, Op, Plan
from ebbtide.interleave.model.workload import Workload

# A cast reads fp32 and writes half precision.
_CAST_BYTES = 4.0


def host_traffic(op: Op, workload: Workload) -> float:
    """Bytes of host memory that an operation reads and writes: an update on the CPU reads gradient and state, and
    writes state and parameter; a copy passes through once."""
    if op.resource == "gpu":
        return 0.0
    if op.kind == "update":
        return workload.cpu_update_bytes * op.params
    if op.kind == "cast":
        return (_CAST_BYTES + workload.param_bytes) * op.params
    return op.nbytes


@dataclass(frozen=True)
class Schedule:
    """starts, ends: of each operation, seconds from the iteration's start. other_s, forward_s, backward_s, update_s: as
    they became, waiting included; the iteration is their sum."""

    plan: Plan
    workload: Workload
    starts: list[float]
    ends: list[float]
    other_s: float
    forward_s: float
    backward_s: float
    update_s: float

    @property
    def iteration_s(self) -> float:
        return self.other_s + self.forward_s + self.backward_s + self.update_s

    @property
    def exposed_s(self) -> float:
        """What the optimizer adds to the iteration."""
        return max(0.0, self.iteration_s - self.workload.compute_s)

    def items(self) -> Iterator[tuple[Op, float, float]]:
        """(operation, start s, end s), in the plan's order."""
        return zip(self.plan.ops, self.starts, self.ends, strict=True)

    def moved_bytes(self, direction: str) -> float:
        """Bytes moved in a direction (`h2d`, `d2h`)."""
        return sum(op.nbytes for op in self.plan.ops if op.resource == direction)

    def busy_shares(self) -> dict[str, float]:
        """The share of the update phase in which each resource works."""
        begin = self.iteration_s - self.update_s
        busy = dict.fromkeys(RESOURCES, 0.0)
        for op, start, end in self.items():
            busy[op.resource] += max(0.0, end - max(start, begin))
        return {resource: min(1.0, s / self.update_s) if self.update_s > 0 else 0.0 for resource, s in busy.items()}

    def host_traffic_in_update(self) -> float:
        """Bytes that CPU updates, casts and copies read and write in host memory within the update."""
        begin = self.iteration_s - self.update_s
        total = 0.0
        for op, start, end in self.items():
            inside = 1.0 if start >= begin else (end - begin) / (end - start) if end > begin else 0.0
            total += inside * host_traffic(op, self.workload)
        return total

    def device_line(self) -> tuple[np.ndarray, np.ndarray]:
        """(times s, bytes) of the device memory that the plan takes, a step function over the iteration: resident
        state, buffers, parked state and kept gradients."""
        changes = [(0.0, self.plan.held_bytes + self._parked_at_start())]
        for op, start, end in self.items():
            if op.acquire:
                changes.append((start, op.acquire))
            if op.release:
                changes.append((end, -op.release))
        changes += self._gradients()
        # At one moment what is given back comes before what is taken.
        changes.sort()
        times = np.array([at for at, _ in changes])
        sizes = np.cumsum([size for _, size in changes])
        last = np.append(np.diff(times) > 0, True)
        return times[last], np.maximum(sizes[last], 0.0)

    def _parked_at_start(self) -> float:
        sizes = self.workload.subgroups
        return self.workload.state_bytes * sum(sizes[subgroup] for subgroup in self.plan.parked)

    def _gradients(self) -> list[tuple[float, float]]:
        """A kept gradient lies on the device from where the backward, in reverse, begins to make it, to its update."""
        if not self.plan.kept_gradients or self.workload.gradients_stay:
            return []
        sizes = self.workload.subgroups
        begin = self.other_s + self.forward_s
        done, made = 0, {}
        for subgroup in reversed(range(len(sizes))):
            made[subgroup] = begin + self.backward_s * done / self.workload.params
            done += sizes[subgroup]
        changes = []
        for op, _, end in self.items():
            if op.kind == "update" and op.subgroup in self.plan.kept_gradients:
                size = self.workload.grad_bytes * op.params
                changes += [(made[op.subgroup], size), (end, -size)]
        return changes

    @property
    def peak_device_bytes(self) -> float:
        return float(self.device_line()[1].max())

    def fits_device(self, gpu_memory_bytes: float | None) -> bool | None:
        """Whether the plan's device memory stays within what is free at every instant; None where that is not known."""
        if self.workload.gpu_free is None:
            if self.peak_device_bytes == 0:
                return True
            return False if gpu_memory_bytes is not None and self.peak_device_bytes > gpu_memory_bytes else None
        times, used = self.device_line()
        line = self.free_line()
        assert line is not None
        free_times, free = line
        # Between the changes; what lasts no longer than rounding does not count.
        edges = np.union1d(np.append(times, self.iteration_s), free_times[free_times <= self.iteration_s])
        lasts = np.diff(edges) > 1e-9 * self.iteration_s
        middle = ((edges[:-1] + edges[1:]) / 2)[lasts]
        taken = used[np.searchsorted(times, middle, side="right") - 1]
        there = free[np.maximum(np.searchsorted(free_times, middle, side="right") - 1, 0)]
        return bool(np.all(taken <= there * (1 + 1e-9) + 1.0))

    def free_line(self) -> tuple[np.ndarray, np.ndarray] | None:
        """(times s, bytes) of what is free beside the job, a step function over the iteration as it became: waiting in
        forward or backward stretches what the workload tells on its own times. None where that is not known."""
        if self.workload.gpu_free is None:
            return None
        own = np.cumsum([0.0, self.workload.other_s, self.workload.forward_s, self.workload.backward_s])
        became = np.cumsum([0.0, self.other_s, self.forward_s, self.backward_s])
        told = np.array([at for at, _ in self.workload.gpu_free])
        times = np.where(told <= own[-1], np.interp(told, own, became), told - own[-1] + became[-1])
        return times, np.array([size for _, size in self.workload.gpu_free])

    def host_bytes(self) -> float:
        """Host memory that the plan needs: state that does not live on the device for good, and gradients that come
        down, in buffers of their own."""
        sizes = self.workload.subgroups
        away = sum(size for subgroup, size in enumerate(sizes) if subgroup not in self.plan.resident)
        down = sum(op.nbytes for op in self.plan.ops if op.kind == "gradient down")
        up = sum(op.nbytes for op in self.plan.ops if op.kind == "upload")
        return self.workload.state_bytes * away + down + up
