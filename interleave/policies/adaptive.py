"""Ours: where each subgroup's state lives and is updated, from the machine's rates and the trace's windows."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import accumulate

from ebbtide.errors import PolicyError
from ebbtide.interleave.model.plan import Plan
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies.placement import Placement, placed
from ebbtide.interleave.policies.registry import Choice, make_plan, nothing_after_colon, policy
from ebbtide.interleave.simulation.bound import guide
from ebbtide.interleave.simulation.simulator import simulate
from ebbtide.machines.machine import Machine

# The search simulates some hundred plans: of more subgroups than this it merges neighbours first.
_MOST_SUBGROUPS = 64
# How many subgroups the plans may have together that are tried after that, and how many plans it tries at least.
_MOST_FINE = 8_000
_LEAST_FINE = 4
# From how many beginnings the search goes out.
_STARTS = 4
_NEVER = float("inf")
# One subgroup comes, one is updated, one goes.
_SLOTS = (1, 2, 3)
_TOO_MUCH = 1e6
_MOVING = 1e-7
# The plans of others that it is held against, and takes where one of them is quicker.
_OTHERS = (
    "pipelined",
    *(f"twin-flow:{share / 10:g},params=pipelined" for share in range(10)),
    *(f"interleaved:{stride}@{share / 10:g}" for stride in range(1, 11) for share in range(10, 0, -1)),
)
# Steps of the search, by (resident, moved, slots, early, late, back), each tried in both directions: along each, from
# one to another, and what has to grow together.
_STEPS = (
    (0, 1, 0, 0, 0, 0),
    (1, -1, 0, 0, 0, 0),
    (1, 0, 0, 0, 0, 0),
    (0, 0, 0, 0, 1, 0),
    (0, 0, 0, 1, 0, 0),
    (0, 0, 0, 1, 1, 0),
    (0, 0, 1, 0, 0, 0),
    (0, 0, 1, 1, 0, 0),
    (0, 0, 1, 0, 1, 0),
    (0, 0, 1, 1, 1, 0),
    (0, 1, 1, 1, 1, 0),
    (1, 0, -1, 0, 0, 0),
    (1, -1, -1, -1, -1, 0),
    (0, 0, 0, 0, 0, 1),
    (0, 0, 1, 1, 0, 1),
)


# What takes less of the device: fewer residents, fewer slots, both.
_SMALLER = ((1, 0, 0, 0, 0, 0), (0, 0, 1, 1, 1, 0), (1, 0, 1, 1, 1, 0))


@policy("adaptive")
def adaptive(workload: Workload, machine: Machine, choice: Choice) -> Plan:
    """Resident in what is always free, parked in windows, streamed through buffers, the rest on the CPU: as rates
    allow."""
    nothing_after_colon(choice)
    if workload.gpu_free is None:
        raise PolicyError(
            f"{choice.text!r} needs to know what device memory is free: give it (--free-bytes 20GiB, or gpu_free_bytes "
            "in a workload file), or a trace with the memory of a GPU"
        )
    coarse, factor = _coarse(workload)
    rough = _Search(coarse, machine, choice.text)
    others = {text: rough.of_plan(make_plan(text, coarse, machine)) for text in _OTHERS}
    ranked = sorted(others, key=lambda text: others[text])
    seeds = sorted({rough.sound(seed) for seed in _seeds(coarse, machine, rough.in_update)}, key=rough.rank)
    found = rough.best_of([rough.improve(seed) for seed in seeds[:_STARTS]])
    search = rough
    if factor > 1:
        search = _Search(workload, machine, choice.text)
        most = max(_LEAST_FINE, _MOST_FINE // len(workload.subgroups))
        found = search.improve(search.fitting(found.scaled(factor), factor), step=max(1, factor // 2), most=most)
    plan = search.plan(found)
    for text in ranked[: 3 if factor > 1 else None]:
        other = make_plan(text, workload, machine)
        if search.of_plan(other) < search.of_plan(plan) * (1 - 1e-12):
            plan = replace(other, policy=choice.text, remark=f"the plan of {text}")
    if plan.remark:
        return plan
    return replace(plan, remark=f"{_told(found, len(workload.subgroups))}; the best of the others was {ranked[0]}")


def _told(placement: Placement, count: int) -> str:
    """A placement in words."""
    moved = placement.moved - placement.parked
    counts = {"resident": placement.resident, "parked": placement.parked, "streamed": moved}
    told = "".join(f"{number} {name}, " for name, number in counts.items() if number)
    return f"{told}{placement.on_cpu(count)} on the CPU"


class _Search:
    """Tries placements by simulating them. What does not fit into the free memory costs everything."""

    def __init__(self, workload: Workload, machine: Machine, text: str) -> None:
        self._workload = workload
        self._machine = machine
        self._text = text
        self._known: dict[Placement, float] = {}
        self._rate = (machine.h2d_bytes_per_s or 1.0) + (machine.d2h_bytes_per_s or 1.0)
        self.in_update = _fitting(workload, workload.free_at(workload.compute_s))
        self._at_start = _fitting(workload, workload.free_at(0.0))

    def sound(self, placement: Placement) -> Placement:
        found = placement.within(len(self._workload.subgroups), self.in_update, self._at_start)
        return replace(found, mixed=False) if self._workload.waits else found

    def plan(self, placement: Placement) -> Plan:
        return placed(self._workload, placement, self._text)

    def cost(self, placement: Placement) -> float:
        if placement not in self._known:
            plan = self.plan(placement)
            # Of what is as quick the one that moves less.
            self._known[placement] = self.of_plan(plan) + _MOVING * sum(op.nbytes for op in plan.ops) / self._rate
        return self._known[placement]

    def of_plan(self, plan: Plan) -> float:
        schedule = simulate(plan, self._workload, self._machine)
        if not schedule.fits_device(None):
            return _NEVER
        host = self._machine.host_memory_bytes
        # Where no plan fits the host's memory, the quickest is still the one to show.
        return schedule.iteration_s + (_TOO_MUCH if host is not None and schedule.host_bytes() > host else 0.0)

    def rank(self, placement: Placement) -> tuple[float, str]:
        """What to sort by: cost, and one order of those that cost the same."""
        return self.cost(placement), repr(placement)

    def best_of(self, placements: Iterable[Placement]) -> Placement:
        return min(map(self.sound, placements), key=self.cost)

    def fitting(self, placement: Placement, factor: int) -> Placement:
        """What fits of a placement that did so with neighbours merged: somewhat less of what stays on the device."""
        for less in (0, 1, factor // 2, factor, 2 * factor, 4 * factor):
            best = self.best_of(placement.moved_by(step, -less) for step in _SMALLER)
            if self.cost(best) < _NEVER:
                return best
        return Placement(0, 0, 0)

    def improve(self, start: Placement, step: int | None = None, most: int | None = None) -> Placement:
        """Steps that halve, as long as one of them helps. step: the first; most: how many plans to try."""
        step = step or max(1, len(self._workload.subgroups) // 8)
        limit = _NEVER if most is None else most + len(self._known)
        best = start
        while step and len(self._known) < limit:
            before = best
            for direction in _STEPS:
                for sign in (1, -1):
                    # As far as it helps.
                    while len(self._known) < limit:
                        tried = self.sound(best.moved_by(direction, sign * step))
                        if self.cost(tried) >= self.cost(best) * (1 - 1e-9):
                            break
                        best = tried
            other_way_round = replace(best, back=best.moved - best.back)
            best = self.best_of([best, replace(best, mixed=not best.mixed), other_way_round])
            if best == before:
                step //= 2
        return best


def _seeds(workload: Workload, machine: Machine, room: int) -> Iterator[Placement]:
    """Where to begin: the bound's own solutions, rounded, and plain streaming. room: for the state of so many in the
    update."""
    count = len(workload.subgroups)
    always = _fitting(workload, workload.least_free)
    for whole in (False, True):
        share = guide(workload, machine, whole)
        resident, early, late = (round(part * count) for part in (share.resident, share.early, share.late))
        moved = count - resident - round(share.on_cpu * count)
        for home in {0, always // 2, always}:
            # What is parked in the bound may as well stay where there is always room.
            stay = (1, -1, -1, -1, -1, 0)
            for less in {0, 1, 2, late // 2}:
                found = Placement(resident, moved, max(early, late), early, late - less)
                yield found.moved_by(stay, home)
                for slots in _SLOTS:
                    # Slots need their room too.
                    fewer = min(resident + home, room - slots)
                    streamed = count - fewer - round(share.on_cpu * count)
                    yield Placement(fewer, streamed, slots, slots, slots - less)
    for moved in range(0, count + 1, max(1, count // 8)):
        for slots in _SLOTS:
            for back in {0, 0 if workload.waits else moved}:
                yield Placement(0, moved, slots, 0, 0, back)
                yield Placement(0, moved, slots, slots, slots, back)


def _fitting(workload: Workload, free: float | None) -> int:
    """Of how many subgroups, the first ones, the state has room."""
    return bisect_right(list(accumulate(workload.subgroups)), (free or 0.0) / workload.state_bytes * (1 + 1e-9))


def _coarse(workload: Workload) -> tuple[Workload, int]:
    """The workload with neighbouring subgroups merged, and how many make one."""
    sizes = workload.subgroups
    factor = -(-len(sizes) // _MOST_SUBGROUPS)
    if factor == 1:
        return workload, 1
    merged = tuple(sum(sizes[start : start + factor]) for start in range(0, len(sizes), factor))
    return replace(workload, sizes=merged), factor
