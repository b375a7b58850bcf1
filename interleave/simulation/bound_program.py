"""The linear program of the bound for plans that may divide subgroups at will."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ebbtide.interleave.model.durations import link_rates
from ebbtide.interleave.model.operations import NO_OVERLAP, Overlap
from ebbtide.interleave.model.schedule import available_host_bytes
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.simulation.linear_program import (
    OVERHEAD,
    IterationInterval,
    LinearProgram,
)
from ebbtide.machines.machine import Machine
from ebbtide.phases import BACKWARD, FORWARD, OTHER, UPDATE

# Parameters in each interval: state fetched and flushed, updates on the CPU and on the
# GPU, gradients copied down and back up, updated parameters uploaded.
_FLOWS = (
    "fetched",
    "flushed",
    "cpu updates",
    "gpu updates",
    "gradients down",
    "gradients up",
    "uploaded",
)
# Flows that are also summed up to the end of each interval, in `total ...`.
_SUMMED = ("cpu updates", "gpu updates", "gradients down")
# There are as many runs of intervals as pairs of edges, and at most this many edges.
_MAX_EDGES = 14
# For sums of shares.
_SHARE_TOLERANCE = 1e-9
# Parameters in each interval of state that is read, written, and so on.
STORAGE_FLOWS = (
    "read",
    "written",
    "written updated",
    "flushed not updated",
    "kept for the next cycle",
)
# State in host memory at the end of an interval, before and after its update.
HOST_STATES = ("host not updated", "host updated")


class BoundProgram(LinearProgram):
    """The linear program of the bound.

    Its variables are the flows of each interval, the state on the device at its ends,
    kept gradients, the update without its overhead, waits in other phases, and the
    exposed time. With updates in the next forward, intervals begin with the backward.
    The solver's tolerances are absolute, so values are kept near 1: shares of all
    parameters, bytes per parameter, times in units of `time_unit_s`.
    """

    def __init__(
        self,
        workload: Workload,
        machine: Machine,
        intervals: list[IterationInterval],
        windows: bool,
        time_unit_s: float,
        overlap: Overlap = NO_OVERLAP,
    ) -> None:
        super().__init__()
        self._overlap = overlap
        self._workload = workload
        self._machine = machine
        self.intervals = intervals
        self.time_unit_s = time_unit_s  # The unit of time in seconds.
        self._storage = storage_limits(workload, machine)
        on_storage = (*STORAGE_FLOWS, *HOST_STATES) if self._storage is not None else ()
        for index, interval in enumerate(intervals):
            for name in (
                *_FLOWS,
                *(f"total {name}" for name in _SUMMED),
                "state",
                *on_storage,
            ):
                self.add_variable(name, index)
            self._forbid_flows(interval, index, windows)
        for name in ("state at start", "update length", "exposed"):
            self.add_variable(name)
        self.add_variable("kept gradients", upper=1.0)
        self._waits = {
            index: self.add_variable("wait", index)
            for index, interval in enumerate(intervals)
            if self._may_wait(interval)
        }
        waits = [*self._waits.values(), self.variable("update length")]
        self.add_row(
            {self.variable("exposed"): 1.0, **dict.fromkeys(waits, -1.0)}, lower=0.0
        )
        for index, interval in enumerate(intervals):
            self._add_interval(interval, index)
        if self._storage is not None:
            phases = [interval.phase for interval in intervals]
            add_storage_rows(self, workload, self._storage, phases, overlap.forward)
        self._end_before_needed()
        if overlap.backward:
            self._limit_speculation()
        self._update_once()
        self._balance_totals()
        self._complete()

    def _complete(self) -> None:
        """Add the rows of a kind of plans, after those that all plans satisfy."""

    def state_before(self, index: int) -> int:
        """Return the variable of the state on the device before an interval."""
        return (
            self.variable("state", index - 1)
            if index
            else self.variable("state at start")
        )

    def _forbid_flows(
        self, interval: IterationInterval, index: int, windows: bool
    ) -> None:
        """Set flows to 0 that an interval cannot have."""
        forbidden = set()
        if interval.phase in (OTHER, FORWARD):
            forbidden |= {"gradients down"}
            if not self._overlap.forward:
                forbidden |= {"cpu updates", "gpu updates", "gradients up", "uploaded"}
        if (
            interval.phase in (BACKWARD, OVERHEAD)
            and self._workload.needs_all_gradients
        ):
            forbidden |= {"gpu updates", "gradients up", "uploaded"}
            if not self._overlap.backward or self._workload.copies_at_step:
                forbidden |= {"cpu updates"}
        if interval.phase == BACKWARD and self._workload.copies_at_step:
            forbidden |= {"gradients down"}
        if not windows and interval.phase not in (OVERHEAD, UPDATE):
            forbidden |= {"fetched", "flushed"}
        if self._machine.gpu_update_params_per_s is None:
            forbidden |= {"gpu updates"}
        if not interval.free_bytes:
            forbidden |= {"fetched", "gpu updates"}
        for name in forbidden:
            self.limit(self.variable(name, index), 0.0)

    def _may_wait(self, interval: IterationInterval) -> bool:
        """Return whether work may stretch an interval.

        Late updates or writes to storage may stretch the forward and the time outside
        of phases. Copies and updates may stop the backward, at no gain but that the
        job's collectives leave the whole link meanwhile.
        """
        if interval.phase == BACKWARD:
            updates = self._overlap.backward or not self._workload.needs_all_gradients
            return updates and interval.link_left != (1.0, 1.0)
        return interval.phase in (OTHER, FORWARD) and (
            self._overlap.forward or self._storage is not None
        )

    def _limit_rate(
        self, terms: dict[int, float], index: int, rate: float, left: float = 1.0
    ) -> None:
        """Require that the terms take at most the interval's length at this rate.

        Collectives leave the share `left` of the rate during compute. The terms are
        divided by the rate: the solver may neglect work that takes hardly any time, but
        not a rate that multiplies the length.
        """
        times = {variable: factor / rate for variable, factor in terms.items()}
        interval = self.intervals[index]
        if interval.phase == UPDATE:
            times[self.variable("update length")] = -1.0
        elif index in self._waits:
            times[self._waits[index]] = -1.0
        self.add_row(times, upper=left * interval.length_s / self.time_unit_s)

    def _add_interval(self, interval: IterationInterval, index: int) -> None:
        workload, machine = self._workload, self._machine

        def flow(name: str) -> int:
            return self.variable(name, index)

        up = {
            flow("fetched"): workload.state_bytes,
            flow("uploaded"): workload.param_bytes,
            flow("gradients up"): workload.grad_bytes,
        }
        down = {
            flow("flushed"): workload.state_bytes,
            flow("gradients down"): workload.grad_bytes,
        }
        up_left, down_left = interval.link_left
        self._limit_rate(up, index, self._link_rate("h2d"), up_left)
        self._limit_rate(down, index, self._link_rate("d2h"), down_left)
        if machine.duplex_bytes_per_s is not None:
            self._limit_rate(
                {**up, **down}, index, self._scaled_rate(machine.duplex_bytes_per_s)
            )
        cpu_traffic = {flow("cpu updates"): workload.cpu_update_bytes}
        traffic = {**cpu_traffic, **up, **down}
        if (storage := self._storage) is not None:
            read, written = (
                {flow(name): workload.state_bytes} for name in ("read", "written")
            )
            self._limit_rate(read, index, self._scaled_rate(storage.read))
            self._limit_rate(written, index, self._scaled_rate(storage.write))
            self._limit_rate(
                {**read, **written}, index, self._scaled_rate(storage.both)
            )
            traffic |= {**read, **written}
        self._limit_rate(
            traffic, index, self._scaled_rate(machine.host_memory_bytes_per_s)
        )
        self._limit_rate(
            {flow("cpu updates"): 1.0},
            index,
            self._scaled_rate(machine.cpu_update_rate(workload.master)),
        )
        if machine.gpu_update_params_per_s is not None:
            gpu_rate = self._scaled_rate(machine.gpu_update_params_per_s)
            self._limit_rate({flow("gpu updates"): 1.0}, index, gpu_rate)
            if self._overlap.forward and interval.phase in (OTHER, FORWARD):
                # Compute stands still during updates on the GPU.
                self.add_row(
                    {
                        flow("gpu updates"): 1 / gpu_rate,
                        self.variable("wait", index): -1.0,
                    },
                    upper=0.0,
                )
        before = self.state_before(index)
        self.add_row(
            {
                flow("state"): 1.0,
                before: -1.0,
                flow("fetched"): -1.0,
                flow("flushed"): 1.0,
            },
            0.0,
            0.0,
        )
        self.add_row(
            {flow("gpu updates"): 1.0, before: -1.0, flow("fetched"): -1.0}, upper=0.0
        )
        may_be_left = self._overlap.forward or interval.phase in (BACKWARD, OVERHEAD)
        ready_after = interval.gradients_ready if may_be_left else 0.0
        self._limit_memory(interval, flow("state"), ready_after, index + 1)
        ready_before = self.intervals[index - 1].gradients_ready if index else 0.0
        self._limit_memory(interval, before, ready_before, index)
        for name in _SUMMED:
            earlier = self.terms(f"total {name}", [index - 1] if index else [], -1.0)
            self.add_row(
                {flow(f"total {name}"): 1.0, **earlier, flow(name): -1.0}, 0.0, 0.0
            )
        if interval.phase == BACKWARD:
            self._limit_to_ready(index, interval.gradients_ready)

    def _limit_to_ready(self, index: int, share: float) -> None:
        """Require that only ready gradients (a share of all) are copied and used until
        an interval ends."""
        self.limit(self.variable("total gradients down", index), share)
        updates = {
            self.variable("total cpu updates", index): 1.0,
            self.variable("total gpu updates", index): 1.0,
        }
        self.add_row(updates, upper=share)

    def _runs(self) -> Iterator[tuple[int, range]]:
        """Yield runs of intervals, a selection if there are many.

        Each has the variable of the state before it.
        """
        count = len(self.intervals)
        edges: Sequence[int] = range(count + 1)
        if count >= _MAX_EDGES:
            # The last two intervals are the update's.
            spread = {
                round(count * number / (_MAX_EDGES - 1)) for number in range(_MAX_EDGES)
            }
            edges = sorted({*spread, count - 1, count - 2})
        for first, end in itertools.combinations(edges, 2):
            yield self.state_before(first), range(first, end)

    def _update_once(self) -> None:
        """Require that state updated in a run of intervals was on the device or fetched
        in the run: nothing is updated twice.

        If all updates are in the last interval, that interval's own row says the
        same."""
        in_one_interval = (
            self._workload.needs_all_gradients and not self._overlap.forward
        )
        for before, run in () if in_one_interval else self._runs():
            self.add_row(
                {
                    **self.terms("gpu updates", run),
                    **self.terms("fetched", run, -1.0),
                    before: -1.0,
                },
                upper=0.0,
            )

    def _end_before_needed(self) -> None:
        """Require that parameters are new when the next forward uses them."""
        new: dict[int, float] = {}
        for index, interval in enumerate(self.intervals):
            new = {
                **new,
                self.variable("uploaded", index): 1.0,
                self.variable("gpu updates", index): 1.0,
            }
            if interval.forward_done is not None:
                self.add_row(new, lower=self._needed_share(interval.forward_done))
                uploads = self.terms("uploaded", range(index + 1), -1.0)
                self.add_row(
                    {self.variable("total cpu updates", index): 1.0, **uploads},
                    lower=0.0,
                )

    def _needed_share(self, forward_done: float) -> float:
        """Return the share of the parameters that the forward needs to be new, by how
        much of it is done."""
        return forward_done * (1 - _SHARE_TOLERANCE)

    def _limit_speculation(self) -> None:
        """Require that updates before the step take as long as out of place.

        The host must have memory for their results beside the state.
        """
        workload, machine = self._workload, self._machine
        early = [
            i
            for i, interval in enumerate(self.intervals)
            if interval.phase in (BACKWARD, OVERHEAD)
        ]
        rate = (
            self._scaled_rate(machine.cpu_update_rate(workload.master))
            * machine.out_of_place_share
        )
        for index in early if workload.clipping else ():
            self._limit_rate({self.variable("cpu updates", index): 1.0}, index, rate)
        # In storage a new state is written beside the old one.
        if (
            machine.host_memory_bytes is not None
            and workload.clipping
            and not machine.storage
        ):
            on_cpu = {
                self.variable("cpu updates", i): 1.0 + (i in early)
                for i in range(len(self.intervals))
            }
            available = (
                machine.host_memory_bytes / workload.params / workload.state_bytes
            )
            # A plan without speculation that needs more than there is can be simulated
            # too.
            self.add_row(on_cpu, upper=max(available, 1.0))

    def _limit_memory(
        self,
        interval: IterationInterval,
        state: int,
        gradients_ready: float,
        intervals_passed: int,
    ) -> None:
        """Require that what is on the device at one end of an interval fits.

        This is the state there (a variable) and the kept gradients, perhaps the last
        ones that the backward computes, each freed with its update."""
        workload, free = self._workload, interval.free_bytes / self._workload.params
        self.add_row({state: workload.state_bytes}, upper=free)
        if gradients_ready and not workload.gradients_held_until_step:
            not_ready = workload.grad_bytes * (1 - gradients_ready)
            passed = [intervals_passed - 1] if intervals_passed else []
            freed = self.terms("total gpu updates", passed, -workload.grad_bytes)
            kept = {self.variable("kept gradients"): workload.grad_bytes}
            self.add_row(
                {state: workload.state_bytes, **kept, **freed}, upper=free + not_ready
            )

    def _balance_totals(self) -> None:
        terms, every, kept = (
            self.terms,
            range(len(self.intervals)),
            {self.variable("kept gradients"): 1.0},
        )
        self.add_row(
            {**terms("cpu updates", every), **terms("gpu updates", every)}, 1.0, 1.0
        )
        self.add_row(
            {**terms("uploaded", every), **terms("cpu updates", every, -1.0)}, 0.0, 0.0
        )
        # A gradient is copied down for an update on the CPU, or copied down and back
        # up; the others are kept.
        self.add_row({**terms("gradients down", every), **kept}, 1.0, 1.0)
        self.add_row(
            {
                **terms("gradients up", every),
                **kept,
                **terms("gpu updates", every, -1.0),
            },
            0.0,
            0.0,
        )
        self.add_row(
            {self.state_before(len(every)): 1.0, self.variable("state at start"): -1.0},
            0.0,
            0.0,
        )

    def _link_rate(self, direction: str) -> float:
        """Return the rate, in the program's units, that the job leaves of a direction
        of the link."""
        return self._scaled_rate(link_rates(self._workload, self._machine)[direction])

    def _scaled_rate(self, rate: float | None) -> float:
        """Convert a rate per second to the program's units."""
        return (rate or 0.0) * self.time_unit_s / self._workload.params


@dataclass(frozen=True)
class StorageLimits:
    """Limits of host memory and storage, bytes and bytes/s."""

    host_bytes: float
    read: float
    write: float
    both: float


def storage_limits(workload: Workload, machine: Machine) -> StorageLimits | None:
    """Return the limits of a machine with storage and known host memory; else None.

    A plan that cannot fit with all state in storage is compared with the bound of a
    host that is just large enough."""
    available = available_host_bytes(workload, machine)
    if available is None or not machine.storage:
        return None
    copies = workload.params * (workload.grad_bytes + workload.param_bytes)
    least = copies + workload.state_bytes * max(workload.subgroups)
    return StorageLimits(
        max(available, least) * (1 + 1e-9),
        sum(path.read_bytes_per_s for path in machine.storage),
        sum(path.write_bytes_per_s for path in machine.storage),
        sum(
            min(
                path.duplex_bytes_per_s or math.inf,
                path.read_bytes_per_s + path.write_bytes_per_s,
            )
            for path in machine.storage
        ),
    )


def add_storage_rows(
    program: LinearProgram,
    workload: Workload,
    limits: StorageLimits,
    phases: Sequence[str],
    late_updates: bool,
) -> None:
    """Require that state moves through host memory in time, and fits it.

    State must be in host memory when it is updated, fetched or written, and host memory
    must hold what is there. State that leaves both memories is written and read in each
    cycle, which begins with the backward if updates are late. What is in host memory
    then waits for its update or for its write.
    """
    count = len(phases)
    start, stays = (
        program.add_variable("host not updated at start"),
        program.add_variable("in memory all the time"),
    )
    written_at_start = program.add_variable("host updated at start")
    last, last_updated = (program.variable(name, count - 1) for name in HOST_STATES)
    program.add_row(
        {start: 1.0, written_at_start: 1.0, last: -1.0, last_updated: -1.0}, upper=0.0
    )
    program.add_row({written_at_start: 1.0, last_updated: -1.0}, upper=0.0)
    copies = workload.grad_bytes + workload.param_bytes
    buffers = program.terms("cpu updates", range(count), copies)
    before, updated_before = start, written_at_start
    for index, phase in enumerate(phases):
        names = (*STORAGE_FLOWS, *HOST_STATES, "fetched", "flushed", "cpu updates")
        of = {name: program.variable(name, index) for name in names}
        if not late_updates or phase not in (OTHER, FORWARD):
            program.limit(of["kept for the next cycle"], 0.0)
        program.add_row(
            {of["flushed not updated"]: 1.0, of["flushed"]: -1.0}, upper=0.0
        )
        program.add_row({of["written updated"]: 1.0, of["written"]: -1.0}, upper=0.0)
        leaving = {of["fetched"]: 1.0, of["cpu updates"]: 1.0}
        arriving = {
            of["read"]: -1.0,
            of["flushed not updated"]: -1.0,
            of["kept for the next cycle"]: -1.0,
        }
        program.add_row(
            {of["host not updated"]: 1.0, before: -1.0, **leaving, **arriving},
            upper=0.0,
        )
        leaving = {of["written updated"]: 1.0, of["kept for the next cycle"]: 1.0}
        arriving = {
            of["cpu updates"]: -1.0,
            of["flushed"]: -1.0,
            of["flushed not updated"]: 1.0,
        }
        program.add_row(
            {of["host updated"]: 1.0, updated_before: -1.0, **leaving, **arriving},
            lower=0.0,
        )
        before, updated_before = of["host not updated"], of["host updated"]
        in_host = {before: workload.state_bytes, updated_before: workload.state_bytes}
        program.add_row(
            {**in_host, **buffers}, upper=limits.host_bytes / workload.params
        )
        program.add_row(
            {
                stays: 1.0,
                before: -1.0,
                updated_before: -1.0,
                program.variable("state", index): -1.0,
            },
            upper=0.0,
        )
    for name in ("read", "written"):
        program.add_row({stays: 1.0, **program.terms(name, range(count))}, lower=1.0)
