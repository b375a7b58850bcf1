"""The least time that any policy can take: a linear program (docs/model.md has its terms and sources)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ebbtide.interleave.model.workload import Workload, value_at
from ebbtide.interleave.simulation.linear_program import LinearProgram, Vector
from ebbtide.machines.machine import Machine

_NEEDED = ("h2d_bytes_per_s", "d2h_bytes_per_s", "host_memory_bytes_per_s", "cpu_update_params_per_s")
# Of each piece, in parameters: state fetched and evicted, updated on the CPU and on the GPU, gradients down and back
# up, updated parameters up.
_FLOWS = ("h", "e", "c", "u", "a", "b", "y")
# Of runs of pieces there are as many as of pairs of these.
_MOST_EDGES = 14
# Bytes of room a parameter, at least: below, within the tolerance of the solver.
_LEAST_ROOM = 1e-6
# What of a flow there was up to a piece's end.
_TOTALS = {"c": "c so far", "u": "u so far", "a": "a so far"}


@dataclass(frozen=True)
class Bound:
    """Seconds. update_s: state moves within the update alone. iteration_s, exposed_s: state may move in any phase.
    exposed_whole_s: the same with whole subgroups."""

    update_s: float
    iteration_s: float
    exposed_s: float
    exposed_whole_s: float


@dataclass(frozen=True)
class Guide:
    """How the bound is reached, in shares of all parameters: what is on the device always, what else is there when the
    update begins and when the iteration does, and what the CPU updates."""

    resident: float
    early: float
    late: float
    on_cpu: float


@dataclass(frozen=True)
class _Piece:
    """A stretch of the iteration. length: s, 0 for the update's, which is the variable. free: bytes. made: the share of
    the gradients that the backward has made by its end."""

    phase: str
    length: float
    free: float
    made: float


def bound(workload: Workload, machine: Machine) -> Bound:
    """The bound of a workload on a machine. Raises MachineError where a rate is not known.

    Where it is not known what memory is free, all of the device's is taken to be: no policy is below that.
    """
    machine.need(_NEEDED, "the bound")
    exposed = _solve(workload, machine, windows=True, whole=False)
    return Bound(
        update_s=_solve(workload, machine, windows=False, whole=False),
        iteration_s=workload.compute_s + exposed,
        exposed_s=exposed,
        exposed_whole_s=_solve(workload, machine, windows=True, whole=True),
    )


def guide(workload: Workload, machine: Machine, whole: bool) -> Guide:
    """How the bound is reached, with or without whole subgroups. Raises MachineError where a rate is not known."""
    machine.need(_NEEDED, "the bound")
    program, found = _solved(workload, machine, windows=True, whole=whole)
    last = len(program.pieces) - 1
    state = [max(0.0, found[program.var("s0")]), *(max(0.0, found[program.var("s", i)]) for i in range(last + 1))]
    resident = min(state)
    return Guide(
        resident=resident,
        early=max(state[:-1]) - resident,
        late=state[0] - resident,
        on_cpu=float(found[program.var(_TOTALS["c"], last)]),
    )


def _pieces(workload: Workload, machine: Machine) -> list[_Piece]:
    everything = (workload.state_bytes + workload.grad_bytes) * workload.params
    line = workload.gpu_free or ((0.0, min(machine.gpu_memory_bytes or everything, everything)),)
    edges = [0.0, workload.other_s, workload.other_s + workload.forward_s, workload.compute_s]
    cuts = sorted({*edges, *(at for at, _ in line if 0 < at < workload.compute_s)})
    pieces = []
    for start, end in itertools.pairwise(cuts):
        phase = ("other", "forward", "backward")[sum(start >= edge for edge in edges[1:3])]
        made = (end - edges[2]) / workload.backward_s if phase == "backward" and workload.backward_s > 0 else 0.0
        pieces.append(_Piece(phase, end - start, value_at(line, start), made))
    # What is free later in the update can only help: the most of it.
    last = max(value_at(line, workload.compute_s), *(size for at, size in line if at > workload.compute_s), 0.0)
    pieces.append(_Piece("overhead", machine.step_overhead_s or 0.0, last, 1.0))
    pieces.append(_Piece("update", 0.0, last, 1.0))
    return pieces


def _solve(workload: Workload, machine: Machine, windows: bool, whole: bool) -> float:
    """The least length of the update, s, its overhead included."""
    program, found = _solved(workload, machine, windows, whole)
    return (machine.step_overhead_s or 0.0) + max(0.0, float(found[program.var("length")])) * program.second


def _solved(workload: Workload, machine: Machine, windows: bool, whole: bool) -> tuple[_Program, Vector]:
    """The program, and the values of its variables where the update is shortest."""
    pieces = _pieces(workload, machine)
    # What CPU and GPU take together, nothing waiting. Where rates lie absurdly far apart an update is so much longer
    # than this that the solver finds none.
    both = workload.params / ((machine.cpu_update_params_per_s or 0.0) + (machine.gpu_update_params_per_s or 0.0))
    # Nor does it where there is room that it cannot tell from none, which counts as none then.
    rooms = (
        pieces,
        [piece if piece.free >= _LEAST_ROOM * workload.params else replace(piece, free=0.0) for piece in pieces],
    )
    for some, second in itertools.product(rooms, (both, 1e5 * both, 1e10 * both)):
        program = _Program(workload, machine, some, windows, second)
        if whole:
            program.whole_subgroups()
        found = program.solution(program.var("length"))
        if found is not None:
            return program, found
    raise RuntimeError("the bound's linear program has no solution")


class _Program(LinearProgram):
    """The rows of the program. Variables: the flows of each piece, s after each piece, s before the first, the kept
    gradients, and the update's length without its overhead.

    The solver's tolerances are absolute, so everything is near 1: parameters are in shares of all, bytes per
    parameter, times in units of `second`, s."""

    def __init__(
        self, workload: Workload, machine: Machine, pieces: list[_Piece], windows: bool, second: float
    ) -> None:
        super().__init__()
        self._workload = workload
        self._machine = machine
        self.pieces = pieces
        self.second = second
        for index, piece in enumerate(pieces):
            for name in (*_FLOWS, *_TOTALS.values(), "s"):
                self.new(name, index)
            self._close(piece, index, windows)
        for name in ("s0", "length"):
            self.new(name)
        self.new("kept", upper=1.0)
        for index, piece in enumerate(pieces):
            self._piece(piece, index)
        self._once()
        self._totals()

    def _close(self, piece: _Piece, index: int, windows: bool) -> None:
        """Flows that a piece cannot have."""
        none = set()
        if piece.phase in ("other", "forward"):
            none |= {"c", "u", "a", "b", "y"}
        if piece.phase in ("backward", "overhead") and self._workload.waits:
            none |= {"c", "u", "b", "y"}
        if piece.phase == "backward" and self._workload.gradients_stay:
            none |= {"a"}
        if not windows and piece.phase not in ("overhead", "update"):
            none |= {"h", "e"}
        if self._machine.gpu_update_params_per_s is None:
            none |= {"u"}
        if not piece.free:
            none |= {"h", "u"}
        for name in none:
            self.limit(self.var(name, index), 0.0)

    def _within(self, terms: dict[int, float], piece: _Piece, rate: float) -> None:
        """At this rate the terms take at most the piece's length, which is a variable in the update. What takes hardly
        any time the solver may leave out; a rate as a factor it may not."""
        times = {variable: factor / rate for variable, factor in terms.items()}
        if piece.phase == "update":
            self.row({**times, self.var("length"): -1.0}, most=0.0)
        else:
            self.row(times, most=piece.length / self.second)

    def _piece(self, piece: _Piece, i: int) -> None:
        w, m, v = self._workload, self._machine, self.var
        state, grad, param = w.state_bytes, w.grad_bytes, w.param_bytes
        up = {v("h", i): state, v("y", i): param, v("b", i): grad}
        down = {v("e", i): state, v("a", i): grad}
        self._within(up, piece, self._rate("h2d"))
        self._within(down, piece, self._rate("d2h"))
        if m.duplex_bytes_per_s is not None:
            self._within({**up, **down}, piece, self._per(m.duplex_bytes_per_s))
        update = {v("c", i): w.cpu_update_bytes}
        self._within({**update, **up, **down}, piece, self._per(m.host_memory_bytes_per_s))
        self._within({v("c", i): 1.0}, piece, self._per(m.cpu_update_params_per_s))
        if m.gpu_update_params_per_s is not None:
            self._within({v("u", i): 1.0}, piece, self._per(m.gpu_update_params_per_s))
        before = v("s", i - 1) if i else v("s0")
        self.row({v("s", i): 1.0, before: -1.0, v("h", i): -1.0, v("e", i): 1.0}, 0.0, 0.0)
        self.row({v("u", i): 1.0, before: -1.0, v("h", i): -1.0}, most=0.0)
        self._fits(piece, v("s", i), piece.made if piece.phase in ("backward", "overhead") else 0.0, i + 1)
        self._fits(piece, before, self.pieces[i - 1].made if i and piece.phase != "other" else 0.0, i)
        for flow, total in _TOTALS.items():
            earlier = {v(total, i - 1): -1.0} if i else {}
            self.row({v(total, i): 1.0, **earlier, v(flow, i): -1.0}, 0.0, 0.0)
        if piece.phase == "backward":
            self.limit(v(_TOTALS["a"], i), piece.made)
            self.row({v(_TOTALS["c"], i): 1.0, v(_TOTALS["u"], i): 1.0}, most=piece.made)

    def _runs(self) -> Iterator[tuple[int, range]]:
        """(the state before it, pieces) of runs of pieces: all, or where there are many so many that they stay few."""
        count = len(self.pieces)
        edges = range(count + 1) if count < _MOST_EDGES else _spread(count, _MOST_EDGES)
        for first, end in itertools.combinations(edges, 2):
            yield self.var("s", first - 1) if first else self.var("s0"), range(first, end)

    def _once(self) -> None:
        """What is updated in a run of pieces was there or has come meanwhile: nothing is updated twice. Where all is
        updated in the last piece, that follows from its own row."""
        for before, run in self._runs() if not self._workload.waits else ():
            came = {self.var("u", i): 1.0 for i in run} | {self.var("h", i): -1.0 for i in run}
            self.row({**came, before: -1.0}, most=0.0)

    def _fits(self, piece: _Piece, state: int, made: float, after: int) -> None:
        """What is on the device at an end of a piece, so many pieces having passed, fits into what is free in it. Kept
        gradients may be the last that the backward makes; each goes with its update."""
        w, free = self._workload, piece.free / self._workload.params
        self.row({state: w.state_bytes}, most=free)
        if made and not w.gradients_stay:
            not_yet = w.grad_bytes * (1 - made)
            gone = {self.var(_TOTALS["u"], after - 1): -w.grad_bytes} if after else {}
            self.row({state: w.state_bytes, self.var("kept"): w.grad_bytes, **gone}, most=free + not_yet)

    def _totals(self) -> None:
        every = range(len(self.pieces))
        v = self.var

        def total(name: str, sign: float = 1.0) -> dict[int, float]:
            return {v(name, i): sign for i in every}

        self.row({**total("c"), **total("u")}, 1.0, 1.0)
        self.row({**total("y"), **total("c", -1.0)}, 0.0, 0.0)
        # A gradient goes down for an update on the CPU, or down and back; the others are kept.
        self.row({**total("a"), v("kept"): 1.0}, 1.0, 1.0)
        self.row({**total("b"), v("kept"): 1.0, **total("u", -1.0)}, 0.0, 0.0)
        self.row({v("s", len(self.pieces) - 1): 1.0, v("s0"): -1.0}, 0.0, 0.0)

    def whole_subgroups(self) -> None:
        """What whole subgroups cost, in rows that every plan keeps to.

        A subgroup that is on the device in part takes the room of a whole one. Operations run at full speed or not at
        all, so the time of a piece divides into modes, by what runs at once (`modes`). Subgroups of the CPU are a whole
        number, and the last one's upload follows its update. What is fetched in the update is updated after it has
        come, and goes after that unless state stays on the device at the end.
        """
        found = self.solution(self.var("length"))
        length = max(0.0, float(found[self.var("length")])) if found is not None else 0.0
        sizes = [size / self._workload.params for size in self._workload.subgroups]
        least = min(sizes)
        even = len(set(sizes[:-1])) <= 1 and sizes[-1] <= sizes[0]
        for index, piece in enumerate(self.pieces):
            # In parameters whose state there is room for.
            free = piece.free / self._workload.params / self._workload.state_bytes
            room = _whole_room(free, sizes[0], sizes[-1]) if even else free
            self.limit(self.var("s", index), room)
            self.limit(self.var("s", index - 1) if index else self.var("s0"), room)
            if free < least:
                for name in ("h", "u"):
                    self.limit(self.var(name, index), 0.0)
            self._modes(piece, index)
        if even:
            self._whole_slots(sizes[0], sizes[-1], length)
        if self._workload.waits:
            if even:
                self._whole_on_cpu(sizes[0], sizes[-1], len(sizes))
            self._whole_streams(least)

    def _modes(self, piece: _Piece, i: int) -> None:
        w, v = self._workload, self.var
        rates = modes(w, self._machine)
        times = [self.new(f"mode{number}", i) for number in range(len(rates))]
        self._within(dict.fromkeys(times, 1.0), piece, 1.0)
        work = (
            {v("c", i): 1.0},
            {v("h", i): w.state_bytes, v("y", i): w.param_bytes, v("b", i): w.grad_bytes},
            {v("e", i): w.state_bytes, v("a", i): w.grad_bytes},
        )
        for which, terms in enumerate(work):
            alone = max(rate[which] for rate in rates)
            needs = {variable: factor / self._per(alone) for variable, factor in terms.items()}
            self.row({**needs, **{t: -rate[which] / alone for t, rate in zip(times, rates, strict=True)}}, most=0.0)

    def _whole_on_cpu(self, size: float, last: float, count: int) -> None:
        m, v = self._machine, self.var
        on_cpu, any_cpu = self.new("on_cpu", upper=count, whole=True), self.new("any_cpu", upper=1, whole=True)
        done = {v("c", i): -1.0 for i in range(len(self.pieces))}
        self.row({on_cpu: size, **done}, 0.0, size - last)
        self.row({on_cpu: 1.0, any_cpu: -count}, most=0.0)
        cpu = self._per(
            min(m.cpu_update_params_per_s or 0.0, (m.host_memory_bytes_per_s or 0.0) / self._workload.cpu_update_bytes)
        )
        upload = self._workload.param_bytes * last / self._rate("h2d")
        self.row({v("length"): 1.0, on_cpu: -size / cpu, any_cpu: -upload}, least=-(size - last) / cpu)

    def _whole_slots(self, size: float, last: float, least: float) -> None:
        """What moves takes the room of a whole subgroup while it comes and goes, what stays takes it all the time: time
        by room, in parameters x units of time, of every run of pieces. least: the update's length at the least."""
        w = self._workload
        come, go = (w.state_bytes / self._rate(direction) for direction in ("h2d", "d2h"))
        lengths = [piece.length / self.second for piece in self.pieces]
        rooms = [_whole_room(piece.free / w.params / w.state_bytes, size, last) for piece in self.pieces]
        update = len(self.pieces) - 1
        for number, (before, run) in enumerate(self._runs()):
            time = sum(lengths[i] for i in run) + (least if update in run else 0.0)
            # A copy that is under way at an edge counts as part here and part there: true of runs that are longer.
            if time < max(come, go) * size:
                continue
            stays = self.new("stays", number)
            moves = {self.var("h", i): -come * size for i in run} | {self.var("e", i): -go * size for i in run}
            self.row({stays: 1.0, before: -1.0, **{self.var("e", i): 1.0 for i in run}}, least=0.0)
            length = {self.var("length"): rooms[update]} if update in run else {}
            there = sum(lengths[i] * rooms[i] for i in run)
            # The last may be smaller, and take its room for less.
            self.row({**length, stays: -time, **moves}, least=-there - (come + go) * (size - last) * last)

    def _whole_streams(self, least: float) -> None:
        """least: the share of the smallest subgroup."""
        w, v = self._workload, self.var
        update = len(self.pieces) - 1
        fetched = self.new("any_fetched", upper=1, whole=True)
        empty = self.new("none_stays", upper=1, whole=True)
        self.row({v("h", update): 1.0, fetched: -1.0}, most=0.0)
        self.row({v("s", update): 1.0, empty: 1.0}, least=least)
        gpu = self._machine.gpu_update_params_per_s
        after = least / self._per(gpu) if gpu else 0.0
        flush = w.state_bytes * least / self._rate("d2h")
        come = w.state_bytes / self._rate("h2d")
        # Both at once: something was fetched, and nothing stays.
        self.row({v("length"): 1.0, v("h", update): -come, fetched: -(after + flush), empty: -flush}, least=-flush)
        self.row({v("length"): 1.0, v("h", update): -come, fetched: -after}, least=0.0)
        if w.gradients_stay:
            return
        # When the first subgroup whose gradient was kept is updated, all kept gradients are there beside its state.
        kept = self.new("any_kept", upper=1, whole=True)
        self.row({v("kept"): 1.0, kept: -1.0}, most=0.0)
        room = self.pieces[update].free / w.params
        self.row({v("kept"): w.grad_bytes, kept: w.state_bytes * least}, most=room)

    def _rate(self, direction: str) -> float:
        """What the job leaves of a direction."""
        rate = getattr(self._machine, f"{direction}_bytes_per_s") or 0.0
        return self._per(rate * (1 - getattr(self._workload, f"{direction}_busy_share")))

    def _per(self, rate: float | None) -> float:
        """A rate per second in the program's units."""
        return (rate or 0.0) * self.second / self._workload.params


def _spread(count: int, most: int) -> list[int]:
    """So many edges of `count` pieces, the last two among them, which are the update's."""
    return sorted({*(round(count * place / (most - 1)) for place in range(most)), count - 1, count - 2})


def modes(workload: Workload, machine: Machine) -> list[tuple[float, float, float]]:
    """(CPU updates/s, h2d bytes/s, d2h bytes/s) of each set of these that can run at once, as the simulator shares: the
    link its duplex limit, all of them the host's memory, slowed by one factor."""
    update = workload.cpu_update_bytes
    cpu = machine.cpu_update_params_per_s or 0.0
    up = (machine.h2d_bytes_per_s or 0.0) * (1 - workload.h2d_busy_share)
    down = (machine.d2h_bytes_per_s or 0.0) * (1 - workload.d2h_busy_share)
    found = []
    for which in range(1, 8):
        runs = [float(which >> bit & 1) for bit in range(3)]
        asked = runs[1] * up + runs[2] * down
        link = min(1.0, machine.duplex_bytes_per_s / asked) if machine.duplex_bytes_per_s and asked else 1.0
        total = runs[0] * cpu * update + link * asked
        share = min(1.0, (machine.host_memory_bytes_per_s or 0.0) / total)
        found.append((runs[0] * cpu * share, runs[1] * up * share * link, runs[2] * down * share * link))
    return found


def _whole_room(free: float, size: float, last: float) -> float:
    """Of what is free what whole subgroups can take, all of one size but the last, which may be smaller."""
    with_last = last + math.floor((free - last) / size + 1e-9) * size if free >= last else 0.0
    return max(math.floor(free / size + 1e-9) * size, with_last)
