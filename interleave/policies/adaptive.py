"""Ours: where each subgroup's state lives and is updated, from the machine's rates and the trace's windows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from ebbtide.interleave.building import PlanBuilder
from ebbtide.interleave.errors import PolicyError
from ebbtide.interleave.machine import Machine
from ebbtide.interleave.plan import STEP, UPDATE, Plan
from ebbtide.interleave.policies.registry import Choice, make_plan, nothing_after_colon, policy
from ebbtide.interleave.simulate import simulate
from ebbtide.interleave.workload import Workload, value_at

# The search simulates some hundred plans: of more subgroups than this it merges neighbours first.
_MOST_SUBGROUPS = 64
# How many plans of all subgroups are tried after that.
_MOST_FINE = 30
_NEVER = float("inf")
# One subgroup comes, one is updated, one goes.
_MOST_BUFFERS = 3
_WAYS = [(wrap, buffers) for wrap in (False, True) for buffers in range(1, _MOST_BUFFERS + 1)]
_TOO_MUCH = 1e6
# The plans of others that it is held against, and takes where one of them is quicker.
_OTHERS = (
    "pipelined",
    *(f"twin-flow:{share / 10:g},params=pipelined" for share in range(10)),
    *(
        f"interleaved:{stride}@{share:g}"
        for stride in (1, 2, 3, 4, 6, 8, 10)
        for share in (1.0, 0.8, 0.6, 0.5, 0.4, 0.2)
    ),
)


@dataclass(frozen=True)
class Shares:
    """How many subgroups are resident, parked and streamed; the rest is updated on the CPU. wrap: streaming goes on
    over the end of the iteration, so that it neither fills nor drains within the update: the first are fetched in the
    backward into buffers that the last leave at the start of the next iteration."""

    resident: int
    parked: int
    streamed: int
    wrap: bool = False
    buffers: int = 3

    def moved(self, which: int, by: int) -> Shares:
        values = [self.resident, self.parked, self.streamed]
        values[which] += by
        return replace(self, resident=values[0], parked=values[1], streamed=values[2])

    def sound(self, count: int) -> bool:
        return (
            min(self.resident, self.parked, self.streamed) >= 0 and self.resident + self.parked + self.streamed <= count
        )

    def scaled(self, factor: int, count: int) -> Shares:
        """So many times as many, `count` in all at the most: the last may stand for fewer."""
        resident = min(self.resident * factor, count)
        parked = min(self.parked * factor, count - resident)
        streamed = min(self.streamed * factor, count - resident - parked)
        return replace(self, resident=resident, parked=parked, streamed=streamed)


@policy("adaptive")
def adaptive(workload: Workload, machine: Machine, choice: Choice) -> Plan:
    """Resident in what is always free, parked in windows, streamed through buffers, the rest on the CPU: as rates
    allow."""
    nothing_after_colon(choice)
    if workload.gpu_free is None:
        raise PolicyError(
            f"{choice.text!r} needs to know what device memory is free: give gpu_free_bytes, or a trace with memory"
        )
    coarse, factor = _coarse(workload)
    rough = _Search(coarse, machine, choice.text)
    others = {text: rough.of_plan(make_plan(text, coarse, machine)) for text in _OTHERS}
    first = min(others, key=lambda text: others[text])
    found = rough.improve(rough.best_of(_seeds(coarse)))
    search = rough
    if factor > 1:
        search = _Search(workload, machine, choice.text)
        start = search.fitting(found.scaled(factor, len(workload.subgroups)), factor)
        found = search.improve(start, step=max(1, factor // 2), most=_MOST_FINE)
    plan = shares_plan(workload, found, choice.text)
    for text in sorted(others, key=lambda text: others[text])[: 3 if factor > 1 else None]:
        other = make_plan(text, workload, machine)
        if search.of_plan(other) < search.of_plan(plan) * (1 - 1e-12):
            plan = replace(other, policy=choice.text, remark=f"the plan of {text}")
    if plan.remark:
        return plan
    names = {"resident": found.resident, "parked": found.parked, "streamed": found.streamed}
    told = "".join(f"{count} {name}, " for name, count in names.items() if count)
    on_cpu = len(workload.subgroups) - sum(names.values())
    return replace(plan, remark=f"{told}{on_cpu} on the CPU; the best of the others was {first}")


class _Search:
    """Tries shares by simulating them. What does not fit into the free memory costs everything."""

    def __init__(self, workload: Workload, machine: Machine, text: str) -> None:
        self._workload = workload
        self._machine = machine
        self._text = text
        self._known: dict[Shares, float] = {}

    def cost(self, shares: Shares) -> float:
        if not shares.sound(len(self._workload.subgroups)):
            return _NEVER
        if shares not in self._known:
            self._known[shares] = self.of_plan(shares_plan(self._workload, shares, self._text))
        return self._known[shares]

    def of_plan(self, plan: Plan) -> float:
        schedule = simulate(plan, self._workload, self._machine)
        if not schedule.fits_device(None):
            return _NEVER
        host = self._machine.host_memory_bytes
        # Where no plan fits the host's memory, the quickest is still the one to show.
        return schedule.iteration_s + (_TOO_MUCH if host is not None and schedule.host_bytes() > host else 0.0)

    def best_of(self, shares: Iterable[Shares]) -> Shares:
        return min(shares, key=self.cost)

    def fitting(self, shares: Shares, factor: int) -> Shares:
        """What fits of shares that did so with neighbours merged: somewhat less of what stays on the device."""
        for less in (0, 1, factor // 2, factor, 2 * factor, 4 * factor):
            fewer = shares.moved(0, -less)
            best = self.best_of([fewer, shares.moved(1, -less), fewer.moved(1, -less)])
            if self.cost(best) < _NEVER:
                return best
        return Shares(0, 0, 0)

    def improve(self, start: Shares, step: int | None = None, most: int | None = None) -> Shares:
        """Steps that halve, along each share and from one to another, as long as one of them helps. step: the first;
        most: how many plans to try."""
        step = step or max(1, len(self._workload.subgroups) // 4)
        most = most + len(self._known) if most is not None else None
        best = start
        while step and (most is None or len(self._known) < most):
            moves = [best.moved(which, sign * step) for which in range(3) for sign in (1, -1)]
            moves += [best.moved(a, step).moved(b, -step) for a in range(3) for b in range(3) if a != b]
            moves.append(replace(best, wrap=not best.wrap))
            moves += [replace(best, buffers=buffers) for buffers in range(1, _MOST_BUFFERS + 1)]
            found = self.best_of([best, *moves])
            if self.cost(found) < self.cost(best) * (1 - 1e-9):
                best = found
                continue
            step //= 2
        return best


def shares_plan(workload: Workload, shares: Shares, text: str) -> Plan:
    """The plan of some shares: resident subgroups first (the backward makes their gradients last), then parked ones,
    then streamed ones and those of the CPU, evenly mixed."""
    count = len(workload.subgroups)
    resident = range(shares.resident)
    parked = range(resident.stop, resident.stop + shares.parked)
    rest = range(parked.stop, count)
    every = len(rest) / shares.streamed if shares.streamed else 0.0
    streamed = [rest[int(every * number + every / 2)] for number in range(shares.streamed)]
    if not workload.clipping:
        # Updates follow the gradients, which come in reverse.
        streamed.reverse()
    wrapped = min(shares.buffers, len(streamed) // 2) if shares.wrap else 0
    late, early = streamed[len(streamed) - wrapped :], streamed[:wrapped]
    kept = _kept(workload, range(parked.stop), streamed, shares.buffers)
    builder = PlanBuilder(text, workload, early=True)
    builder.leave([*late, *parked])
    builder.gradients(keep=kept)
    home = workload.state_bytes * sum(builder.sizes[subgroup] for subgroup in resident)
    coming = [*parked, *early]
    needs = [workload.state_bytes * builder.sizes[subgroup] for subgroup in coming]
    for subgroup, point in zip(coming, builder.points(kept, home, needs), strict=True):
        builder.fetch(subgroup, point=point)
    for subgroup in resident:
        builder.resident(subgroup)
    for subgroup in parked:
        builder.update_fetched(subgroup)
    _stream(builder, sorted(set(rest) - set(streamed)), streamed, wrapped, shares.buffers)
    return builder.plan()


def _stream(builder: PlanBuilder, on_cpu: list[int], streamed: list[int], wrapped: int, buffers: int) -> None:
    """Stream through buffers beside the CPU's updates: the first `wrapped` have been fetched, the last leave later."""
    flushes: list[int] = []
    late = set(streamed[len(streamed) - wrapped :])

    def go(count: int) -> None:
        for number in range(len(flushes), min(count, len(streamed))):
            subgroup = streamed[number]
            if number >= wrapped:
                # The first fetches are issued as soon as the backward is over.
                point = UPDATE if number < buffers else STEP
                builder.fetch(subgroup, (flushes[number - buffers],) if number >= buffers else (), point)
            update = builder.update_fetched(subgroup)
            flushes.append(update if subgroup in late else builder.flush(subgroup, update))

    for number, subgroup in enumerate(on_cpu):
        go(len(streamed) * number // len(on_cpu) + buffers)
        builder.on_cpu(subgroup)
    go(len(streamed))


def _kept(workload: Workload, homes: range, streamed: list[int], buffers: int) -> frozenset[int]:
    """Whose gradients stay on the device from the backward to the update: of all that are updated there as many as
    there is room for, those first whose state is there too."""
    sizes, line = workload.subgroups, workload.gpu_free or ((0.0, 0.0),)
    begin = workload.compute_s - workload.backward_s
    # A gradient takes its room as the backward begins to make it.
    made = begin + workload.backward_s * (np.cumsum(sizes[::-1])[::-1] - np.array(sizes)) / workload.params
    state = workload.state_bytes * sum(sizes[subgroup] for subgroup in homes)
    passing = buffers * workload.state_bytes * max((sizes[subgroup] for subgroup in streamed), default=0)
    edges = [at for at, _ in line if begin < at <= workload.compute_s] + [workload.compute_s]
    room = []
    for start, end in zip([begin, *edges[:-1]], edges, strict=True):
        room.append((end, value_at(line, start)))
    room.append((np.inf, value_at(line, workload.compute_s) - state - passing))
    candidates = [*homes, *streamed]

    def fits(count: int) -> bool:
        chosen = np.array(candidates[:count], dtype=int)
        held = np.array(sizes)[chosen] * workload.grad_bytes if count else np.zeros(0)
        return all(held[made[chosen] < end].sum() <= size for end, size in room)

    low, high = 0, len(candidates)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return frozenset(candidates[:low])


def _seeds(workload: Workload) -> list[Shares]:
    """Where to begin: what the memory that is free always, or in the update, could hold."""
    sizes = workload.subgroups
    count = len(sizes)
    size = (workload.state_bytes + workload.grad_bytes) * max(sizes)
    always = min(count, int((workload.least_free or 0.0) / size))
    in_update = min(count, int((workload.free_at(workload.compute_s) or 0.0) / size))
    parked = max(0, min(count, in_update) - always)
    seeds = []
    for resident in {0, always // 2, always}:
        for away in {0, parked // 2, parked}:
            rest = max(0, count - resident - away)
            for share in range(5):
                seeds += [Shares(resident, away, rest * share // 4, wrap, buffers) for wrap, buffers in _WAYS]
    return [seed for seed in seeds if seed.sound(count)]


def _coarse(workload: Workload) -> tuple[Workload, int]:
    """The workload with neighbouring subgroups merged, and how many make one."""
    sizes = workload.subgroups
    factor = -(-len(sizes) // _MOST_SUBGROUPS)
    if factor == 1:
        return workload, 1
    merged = tuple(sum(sizes[start : start + factor]) for start in range(0, len(sizes), factor))
    return replace(workload, sizes=merged), factor
