"""The linear program of the bound for plans of whole subgroups."""

import math
from bisect import bisect_right
from itertools import accumulate
from typing import NamedTuple

from ebbtide.interleave.model.durations import alone_cpu_rate
from ebbtide.interleave.model.operations import NO_OVERLAP
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.simulation.bound_program import BoundProgram
from ebbtide.interleave.simulation.linear_program import (
    IterationInterval,
    gradient_ready_s,
)
from ebbtide.machines.machine import Machine
from ebbtide.phases import BACKWARD

# A schedule may exceed the free memory by this share, and by this many bytes.
_TOLERANCE, _TOLERANCE_BYTES = 1e-9, 1.0


class ModeRates(NamedTuple):
    """Rates of resources that run at the same time; 0 for those that do not run."""

    cpu_params_per_s: float
    h2d_bytes_per_s: float
    d2h_bytes_per_s: float


def link_factors(up_rate: float, down_rate: float, limit: float) -> tuple[float, float]:
    """Return the slowdown of both directions of the link that together exceed a limit.

    Each gets half of the limit, and what the other direction leaves of its half
    (max-min fairness).
    """
    half = limit / 2
    up = min(up_rate, max(half, limit - down_rate))
    down = min(down_rate, limit - up)
    return up / up_rate if up_rate else 1.0, down / down_rate if down_rate else 1.0


class WholeSubgroupProgram(BoundProgram):
    """Adds what whole subgroups cost to the bound, in rows that every plan satisfies.

    A subgroup that is on the device in part takes the memory of a whole one, operations
    run at full speed or not at all (see `modes`), and the CPU updates a whole number.
    The last upload follows its update, a flush the update of what was fetched, unless
    that stays.
    """

    def _complete(self) -> None:
        workload, overlap = self._workload, self._overlap
        # The length is from the rows of all plans alone.
        values = (
            self.minimize(self.variable("update length"))
            if overlap == NO_OVERLAP
            else None
        )
        min_length = (
            0.0
            if values is None
            else max(0.0, float(values[self.variable("update length")]))
        )
        # Subgroups as shares of all parameters.
        sizes = [size / workload.params for size in workload.subgroups]
        smallest = min(sizes)
        self._size, self._last_size, self._count = sizes[0], sizes[-1], len(sizes)
        even = len(set(sizes[:-1])) <= 1 and sizes[-1] <= sizes[0]
        for index, interval in enumerate(self.intervals):
            free = self._free_share(interval)
            room = self._whole_room(free) if even else free
            self.limit(self.variable("state", index), room)
            self.limit(self.state_before(index), room)
            if free < smallest * (1 - _TOLERANCE):
                for name in ("fetched", "gpu updates"):
                    self.limit(self.variable(name, index), 0.0)
            self._divide_into_modes(interval, index)
        if overlap.backward or not workload.needs_all_gradients:
            self._follow_gradients()
        if overlap != NO_OVERLAP:
            # The rows below are about updates that begin and end with the step.
            return
        if even:
            self._limit_memory_time(min_length)
        if workload.needs_all_gradients:
            if even:
                self._whole_number_on_cpu()
            self._order_streams(smallest)
        else:
            self._end_after_last_gradients()

    def _needed_share(self, forward_done: float) -> float:
        """Return the share of the subgroups that the forward has begun to use, or
        begins to use next."""
        sizes = self._workload.subgroups
        ends = [total / self._workload.params for total in accumulate(sizes)]
        # The subgroup that begins here is needed too; the tolerance is for sums of
        # shares.
        begun = bisect_right([0.0, *ends[:-1]], forward_done * (1 + _TOLERANCE))
        return ends[begun - 1] * (1 - _TOLERANCE)

    def _free_share(self, interval: IterationInterval) -> float:
        """Return the share of all parameters whose state fits into the free memory.

        A plan may exceed the free memory as far as `Schedule.fits_device` allows."""
        allowed = (
            interval.free_bytes * (1 + _TOLERANCE) + _TOLERANCE_BYTES
            if interval.free_bytes
            else 0.0
        )
        return allowed / self._workload.params / self._workload.state_bytes

    def _whole_room(self, free: float) -> float:
        """Return the part of a free share that whole subgroups can use.

        All are of one size but a smaller last one.
        """
        size, last = self._size, self._last_size
        with_last = (
            last + math.floor((free - last) / size + 1e-9) * size
            if free >= last
            else 0.0
        )
        return max(math.floor(free / size + 1e-9) * size, with_last)

    def _follow_gradients(self) -> None:
        """Require that a subgroup is updated after all of its gradient is ready."""
        workload = self._workload
        ready_s = gradient_ready_s(workload)
        end_s = workload.compute_s - workload.backward_s
        for index, interval in enumerate(self.intervals):
            if interval.phase != BACKWARD:
                continue
            end_s += interval.length_s
            # The tolerance is for sums of lengths.
            ready = [
                size
                for size, at_s in zip(workload.subgroups, ready_s, strict=True)
                if at_s < end_s * (1 - 1e-9)
            ]
            self._limit_to_ready(index, sum(ready) / workload.params)

    def _end_after_last_gradients(self) -> None:
        """Require that the update is long enough for the last gradients."""
        workload, update = self._workload, len(self.intervals) - 1
        ready_s = gradient_ready_s(workload)
        waits = {
            wait: 1.0
            for index, wait in self._waits.items()
            if self.intervals[index].phase == BACKWARD
        }
        length = {self.variable("update length"): 1.0, **waits}
        overhead = self.intervals[update - 1].length_s / self.time_unit_s
        on_cpu = self.add_variable("last subgroup on the CPU", upper=1, integer=True)
        for number, size in enumerate(workload.subgroups):
            cpu, gpu = self._times_after_gradient(size / workload.params)
            passed = (
                workload.compute_s - ready_s[number]
            ) / self.time_unit_s + overhead
            if number:
                if min(cpu, gpu) > passed:
                    self.add_row(length, lower=min(cpu, gpu) - passed)
                continue
            if gpu == math.inf:
                self.add_row({on_cpu: 1.0}, lower=1.0)
                gpu = cpu
            self.add_row({**length, on_cpu: gpu - cpu}, lower=gpu - passed)
            share = size / workload.params
            for name, factor, lower in (
                ("cpu updates", -share, 0.0),
                ("gpu updates", share, share),
            ):
                self.add_row(
                    {**self.terms(name, (update - 1, update)), on_cpu: factor},
                    lower=lower,
                )

    def _times_after_gradient(self, size: float) -> tuple[float, float]:
        """Return the least times until a subgroup is done after its gradient is ready.

        The times are on the CPU, and on the GPU. `size` is a share of all parameters.
        """
        workload, machine = self._workload, self._machine
        down = workload.grad_bytes / self._link_rate("d2h")
        cpu_rate = self._scaled_rate(alone_cpu_rate(workload, machine))
        cpu = size * (
            down + 1 / cpu_rate + workload.param_bytes / self._link_rate("h2d")
        )
        if machine.gpu_update_params_per_s is None or size > self._free_share(
            self.intervals[-1]
        ) * (1 + _TOLERANCE):
            return cpu, math.inf
        stays = size <= self._free_share(self.intervals[0]) * (1 + _TOLERANCE)
        flush = 0.0 if stays else workload.state_bytes / self._link_rate("d2h")
        return cpu, size * (
            1 / self._scaled_rate(machine.gpu_update_params_per_s) + flush
        )

    def _divide_into_modes(self, interval: IterationInterval, index: int) -> None:
        workload = self._workload
        rates = modes(workload, self._machine)
        times = [
            self.add_variable(f"time in mode {number}", index)
            for number in range(len(rates))
        ]
        self._limit_rate(dict.fromkeys(times, 1.0), index, 1.0)
        # Work by resource, in the order of `ModeRates`.
        work: tuple[dict[int, float], ...] = (
            {self.variable("cpu updates", index): 1.0},
            {
                self.variable("fetched", index): workload.state_bytes,
                self.variable("uploaded", index): workload.param_bytes,
                self.variable("gradients up", index): workload.grad_bytes,
            },
            {
                self.variable("flushed", index): workload.state_bytes,
                self.variable("gradients down", index): workload.grad_bytes,
            },
        )
        for terms, mode_rates in zip(work, zip(*rates, strict=True), strict=True):
            alone = max(mode_rates)
            needed = {
                variable: factor / self._scaled_rate(alone)
                for variable, factor in terms.items()
            }
            done = {
                time: -rate / alone
                for time, rate in zip(times, mode_rates, strict=True)
            }
            self.add_row({**needed, **done}, upper=0.0)

    def _whole_number_on_cpu(self) -> None:
        size, last, count = self._size, self._last_size, self._count
        on_cpu = self.add_variable("subgroups on the CPU", upper=count, integer=True)
        any_on_cpu = self.add_variable("any subgroup on the CPU", upper=1, integer=True)
        updates = self.terms("cpu updates", range(len(self.intervals)), -1.0)
        self.add_row({on_cpu: size, **updates}, 0.0, size - last)
        self.add_row({on_cpu: 1.0, any_on_cpu: -count}, upper=0.0)
        cpu_rate = self._scaled_rate(alone_cpu_rate(self._workload, self._machine))
        upload = self._workload.param_bytes * last / self._link_rate("h2d")
        terms = {
            self.variable("update length"): 1.0,
            on_cpu: -size / cpu_rate,
            any_on_cpu: -upload,
        }
        self.add_row(terms, lower=-(size - last) / cpu_rate)

    def _limit_memory_time(self, min_length: float) -> None:
        """Limit memory x time in every run of intervals, for an update of `min_length`.

        The unit is parameters x units of time; the update is at least that long. State
        that moves takes the memory of a whole subgroup while it is copied, state that
        stays all the time.
        """
        size, last = self._size, self._last_size
        fetch_time, flush_time = (
            self._workload.state_bytes / self._link_rate(direction)
            for direction in ("h2d", "d2h")
        )
        lengths = [interval.length_s / self.time_unit_s for interval in self.intervals]
        rooms = [
            self._whole_room(self._free_share(interval)) for interval in self.intervals
        ]
        update = len(self.intervals) - 1
        for number, (before, run) in enumerate(self._runs()):
            time = sum(lengths[i] for i in run) + (min_length if update in run else 0.0)
            # A copy in flight at an edge counts in part on both sides of it. This holds
            # only in longer runs.
            if time < max(fetch_time, flush_time) * size:
                continue
            stays = self.add_variable("stays", number)
            fetched = self.terms("fetched", run, -fetch_time * size)
            flushed = self.terms("flushed", run, -flush_time * size)
            self.add_row(
                {stays: 1.0, before: -1.0, **self.terms("flushed", run)}, lower=0.0
            )
            length = (
                {self.variable("update length"): rooms[update]} if update in run else {}
            )
            length |= {wait: rooms[i] for i, wait in self._waits.items() if i in run}
            available = sum(lengths[i] * rooms[i] for i in run)
            # The last subgroup may be smaller, and take its memory for less time.
            smaller_last = (fetch_time + flush_time) * (size - last) * last
            self.add_row(
                {**length, stays: -time, **fetched, **flushed},
                lower=-available - smaller_last,
            )

    def _order_streams(self, smallest: float) -> None:
        """Require that at least as much is fetched as updated, and updated as flushed.

        `smallest` is the smallest subgroup, as a share of all parameters."""
        workload = self._workload
        update = len(self.intervals) - 1
        fetched, state = (
            self.variable("fetched", update),
            self.variable("state", update),
        )
        length = {self.variable("update length"): 1.0}
        any_fetched = self.add_variable("any fetched", upper=1, integer=True)
        none_stays = self.add_variable("none stays", upper=1, integer=True)
        self.add_row({fetched: 1.0, any_fetched: -1.0}, upper=0.0)
        self.add_row({state: 1.0, none_stays: 1.0}, lower=smallest)
        gpu_rate = self._machine.gpu_update_params_per_s
        update_time = smallest / self._scaled_rate(gpu_rate) if gpu_rate else 0.0
        flush_time = workload.state_bytes * smallest / self._link_rate("d2h")
        fetch_time = workload.state_bytes / self._link_rate("h2d")
        # If something was fetched and nothing stays, the last flush comes after the
        # last update.
        both = {any_fetched: -(update_time + flush_time), none_stays: -flush_time}
        self.add_row({**length, fetched: -fetch_time, **both}, lower=-flush_time)
        self.add_row(
            {**length, fetched: -fetch_time, any_fetched: -update_time}, lower=0.0
        )
        if workload.gradients_held_until_step:
            return
        # When the first subgroup with a kept gradient is updated, all kept gradients
        # and its state are on the device.
        kept = self.variable("kept gradients")
        any_kept = self.add_variable("any gradient kept", upper=1, integer=True)
        self.add_row({kept: 1.0, any_kept: -1.0}, upper=0.0)
        free = self._free_share(self.intervals[update]) * workload.state_bytes
        self.add_row(
            {kept: workload.grad_bytes, any_kept: workload.state_bytes * smallest},
            upper=free,
        )


def modes(workload: Workload, machine: Machine) -> list[ModeRates]:
    """Return the rates of each set of resources that can run at the same time, shared
    as in the simulator.

    The CPU may have fewer threads, down to those for which copies leave enough memory:
    any other number is between the two."""
    cpu_bytes = workload.cpu_update_bytes
    cpu = machine.cpu_update_rate(workload.master) or 0.0
    up = (machine.h2d_bytes_per_s or 0.0) * (1 - workload.h2d_busy_share)
    down = (machine.d2h_bytes_per_s or 0.0) * (1 - workload.d2h_busy_share)
    rates = []
    for subset in range(1, 8):
        cpu_runs, up_runs, down_runs = (float(subset >> bit & 1) for bit in range(3))
        up_rate, down_rate = up_runs * up, down_runs * down
        if (
            machine.duplex_bytes_per_s is not None
            and up_rate + down_rate > machine.duplex_bytes_per_s
        ):
            up_link, down_link = link_factors(
                up_rate, down_rate, machine.duplex_bytes_per_s
            )
            up_rate, down_rate = up_rate * up_link, down_rate * down_link
        copied = up_rate + down_rate
        total = cpu_runs * cpu * cpu_bytes + copied
        share = min(1.0, (machine.host_memory_bytes_per_s or 0.0) / total)
        rates.append(
            ModeRates(cpu_runs * cpu * share, up_rate * share, down_rate * share)
        )
        left = (machine.host_memory_bytes_per_s or 0.0) - copied
        if cpu_runs and copied and share < 1 and left > 0:
            rates.append(ModeRates(left / cpu_bytes, up_rate, down_rate))
    return rates
