"""Linear programs with a few integer variables, solved by branch and bound over HiGHS'
linear solver.

HiGHS' own integer solver is not used: on one of some hundred programs of the bound's
kind it crashed the interpreter (HiGHS 1.12 in scipy 1.17.1), and on others it printed
to stdout past Python.
"""

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from heapq import heappop, heappush
from typing import Any, NamedTuple

import numpy as np

from ebbtide.extras import require
from ebbtide.interleave.model.durations import link_shares, norm_s
from ebbtide.interleave.model.plan import BACKWARD as BACKWARD_POINT
from ebbtide.interleave.model.plan import FORWARD as FORWARD_POINT
from ebbtide.interleave.model.plan import forward_points, gradient_ready_points
from ebbtide.interleave.model.workload import Workload, value_at
from ebbtide.machines.machine import Machine
from ebbtide.phases import BACKWARD, FORWARD, OTHER, UPDATE

Vector = np.ndarray[Any, Any]
# A value nearer than this to a whole number counts as whole.
_INTEGER_TOLERANCE = 1e-6
# Each relaxation takes a millisecond or less. The result after this many is still a
# bound of the program, a lower one.
_MAX_RELAXATIONS = 200
# The phase between backward and update, in which the overhead of the step and the norm
# of the gradients pass.
OVERHEAD = "overhead"
# Where updates follow their gradients, this many of the last gradients, and this many
# of all, begin a new interval.
_LAST_CUTS, _SPREAD_CUTS = 4, 4
# Where updates may end in the forward, at most about this many subgroups, evenly
# spread, begin a new interval.
_FORWARD_CUTS = 12
# The shortest interval that a gradient begins, as a share of the backward.
_LEAST_INTERVAL = 1e-6


class _Row(NamedTuple):
    """The constraint `lower` <= sum of factor x variable <= `upper`."""

    terms: dict[int, float]
    lower: float
    upper: float


class _Relaxation(NamedTuple):
    """A solved relaxation. Ordered by its objective, then by when it was solved."""

    objective: float
    number: int
    values: Vector
    lower: Vector
    upper: Vector


@cache
def _solver_class() -> Any:
    """Return HiGHS that prints nothing, not even the line with its version that its
    constructor prints since 1.16."""
    highs: Any = require("highspy").Highs

    def enable_callbacks(self: Any) -> None:
        """Enable callbacks.

        The constructor does so before anything else that could print.
        """
        self.setOptionValue("output_flag", False)
        highs.enableCallbacks(self)

    return type("SilentHighs", (highs,), {"enableCallbacks": enable_callbacks})


class LinearProgram:
    """Variables, rows that constrain them, and one variable to minimise.

    Variables have a lower bound of 0.
    """

    def __init__(self) -> None:
        self._variables: dict[tuple[str, int], int] = {}
        self._upper: list[float] = []
        self._integers: list[int] = []
        self._rows: list[_Row] = []

    def add_variable(
        self, name: str, index: int = 0, upper: float = math.inf, integer: bool = False
    ) -> int:
        """Add a variable and return its number."""
        self._variables[name, index] = variable = len(self._upper)
        self._upper.append(upper)
        if integer:
            self._integers.append(variable)
        return variable

    def variable(self, name: str, index: int = 0) -> int:
        return self._variables[name, index]

    def terms(
        self, name: str, indices: Iterable[int], factor: float = 1.0
    ) -> dict[int, float]:
        """Return the terms of the sum of variables with a name, times a factor."""
        return {self._variables[name, index]: factor for index in indices}

    def limit(self, variable: int, upper: float) -> None:
        self._upper[variable] = min(self._upper[variable], upper)

    def add_row(
        self, terms: dict[int, float], lower: float = -math.inf, upper: float = math.inf
    ) -> None:
        self._rows.append(_Row(terms, lower, upper))

    def minimize(self, variable: int) -> Vector | None:
        """Return the values of all variables where this one is smallest.

        Return None if no values satisfy the rows. The smallest open relaxation is
        branched next, so the first one whose integers are whole is optimal.
        """
        solver = self._solver(variable)
        solved_status = require("highspy").HighsModelStatus.kOptimal
        variables = np.arange(len(self._upper), dtype=np.int32)
        open_relaxations: list[_Relaxation] = []
        solved = 0

        def relax(lower: Vector, upper: Vector) -> None:
            nonlocal solved
            solved += 1
            solver.changeColsBounds(len(variables), variables, lower, upper)
            solver.run()
            if solver.getModelStatus() == solved_status:
                values = np.array(solver.getSolution().col_value)
                heappush(
                    open_relaxations,
                    _Relaxation(float(values[variable]), solved, values, lower, upper),
                )

        relax(np.zeros(len(self._upper)), np.array(self._upper))
        while open_relaxations:
            _, _, values, lower, upper = heappop(open_relaxations)
            fractional = [
                i
                for i in self._integers
                if abs(values[i] - round(values[i])) > _INTEGER_TOLERANCE
            ]
            if not fractional or solved >= _MAX_RELAXATIONS:
                return values
            branch = fractional[0]
            below, above = upper.copy(), lower.copy()
            below[branch], above[branch] = (
                math.floor(values[branch]),
                math.ceil(values[branch]),
            )
            relax(lower, below)
            relax(above, upper)
        return None

    def _solver(self, variable: int) -> Any:
        """Return HiGHS with this program, set to minimise a variable. Raises
        MissingPackageError without it."""
        highspy = require("highspy")
        program = highspy.HighsLp()
        program.num_col_, program.num_row_ = len(self._upper), len(self._rows)
        cost = np.zeros(len(self._upper))
        cost[variable] = 1.0
        program.col_cost_ = cost
        program.col_lower_, program.col_upper_ = (
            np.zeros(len(self._upper)),
            np.array(self._upper),
        )
        program.row_lower_ = np.array([row.lower for row in self._rows])
        program.row_upper_ = np.array([row.upper for row in self._rows])
        matrix = program.a_matrix_
        matrix.format_ = highspy.MatrixFormat.kRowwise
        matrix.start_ = np.cumsum(
            [0, *(len(row.terms) for row in self._rows)], dtype=np.int32
        )
        matrix.index_ = np.array(
            [column for row in self._rows for column in row.terms], dtype=np.int32
        )
        matrix.value_ = np.array(
            [factor for row in self._rows for factor in row.terms.values()]
        )
        solver = _solver_class()()
        solver.setOptionValue("threads", 1)
        solver.passModel(program)
        return solver


@dataclass(frozen=True)
class IterationInterval:
    """A part of the iteration with a single phase and constant free memory."""

    phase: str  # `other`, `forward`, `backward`, `overhead` (of the step) or `update`.
    # Seconds; 0 for the update, whose length is the variable of the program.
    length_s: float
    free_bytes: float
    # Share of the gradients that the backward has computed by its end.
    gradients_ready: float
    # Shares of the link that the job's collectives leave, to the device and to the
    # host.
    link_left: tuple[float, float] = (1.0, 1.0)
    # Share of the forward that is done by its end, where updates may end in the
    # forward; else None.
    forward_done: float | None = None


def gradient_ready_s(workload: Workload) -> list[float]:
    """Return the seconds from the start of the iteration at which the backward has
    computed each subgroup's gradient."""
    begin_s = workload.compute_s - workload.backward_s
    return [
        begin_s + workload.backward_s * (point - BACKWARD_POINT)
        for point in gradient_ready_points(workload)
    ]


def _gradient_cuts(workload: Workload, speculates: bool) -> set[float]:
    """Return some of the times at which gradients become ready, and the last ones, if
    updates follow them."""
    waits = workload.copies_at_step or (workload.needs_all_gradients and not speculates)
    if waits or not workload.backward_s:
        return set()
    ready_s = gradient_ready_s(workload)
    selected = {
        *range(min(_LAST_CUTS, len(ready_s))),
        *range(0, len(ready_s), max(1, len(ready_s) // _SPREAD_CUTS)),
    }
    length_s = _LEAST_INTERVAL * workload.backward_s
    # The first subgroup's gradient is ready when the backward ends.
    return {
        ready_s[number]
        for number in selected
        if number and ready_s[number] < workload.compute_s - length_s
    }


def intervals_of(
    workload: Workload, machine: Machine, speculates: bool = False
) -> list[IterationInterval]:
    """Return the intervals of an iteration, the update last. With `speculates` updates
    may follow their gradients."""
    everything = (workload.state_bytes + workload.grad_bytes) * workload.params
    free_steps = workload.gpu_free or (
        (0.0, min(machine.gpu_memory_bytes or everything, everything)),
    )
    edges = [
        0.0,
        workload.other_s,
        workload.other_s + workload.forward_s,
        workload.compute_s,
    ]
    cuts = sorted(
        {*edges, *(time for time, _ in free_steps if 0 < time < workload.compute_s)}
        | _gradient_cuts(workload, speculates)
    )
    link_left = link_shares(workload, machine)
    intervals = []
    for start, end in itertools.pairwise(cuts):
        phase = (OTHER, FORWARD, BACKWARD)[sum(start >= edge for edge in edges[1:3])]
        ready = (
            (end - edges[2]) / workload.backward_s
            if phase == BACKWARD and workload.backward_s > 0
            else 0.0
        )
        left = link_left.get(phase, (1.0, 1.0))
        intervals.append(
            IterationInterval(
                phase, end - start, value_at(free_steps, start), ready, left
            )
        )
    # More free memory later in the update can only help: the largest value counts for
    # the whole update.
    in_update = max(
        value_at(free_steps, workload.compute_s),
        *(size for time, size in free_steps if time > workload.compute_s),
        0.0,
    )
    overhead_s = (machine.step_overhead_s or 0.0) + norm_s(workload, machine)
    intervals.append(IterationInterval(OVERHEAD, overhead_s, in_update, 1.0))
    intervals.append(IterationInterval(UPDATE, 0.0, in_update, 1.0))
    return intervals


def cycle_intervals_of(
    workload: Workload, machine: Machine, speculates: bool = False
) -> list[IterationInterval]:
    """Return the intervals from a backward to the next.

    The first piece of the forward is the wait before it.
    """
    intervals = intervals_of(workload, machine, speculates)
    before = [interval for interval in intervals if interval.phase == OTHER]
    forward = [interval for interval in intervals if interval.phase == FORWARD]
    rest = intervals[len(before) + len(forward) :]
    first_free = (forward or rest)[0].free_bytes
    link_left = link_shares(workload, machine).get(FORWARD, (1.0, 1.0))
    pieces = [IterationInterval(FORWARD, 0.0, first_free, 1.0, link_left, 0.0)]
    done = 0.0
    starts = sorted({point - FORWARD_POINT for point in forward_points(workload)})
    # The use of the last subgroup is the last thing that may wait.
    selected = {*starts[:: max(1, -(-len(starts) // _FORWARD_CUTS))], starts[-1]}
    for interval in forward:
        end = done + interval.length_s / workload.forward_s
        for cut in (*(share for share in sorted(selected) if done < share < end), end):
            length_s = (cut - done) * workload.forward_s
            pieces.append(
                replace(
                    interval,
                    length_s=length_s,
                    gradients_ready=1.0,
                    forward_done=min(cut, 1.0),
                )
            )
            done = cut
    pieces[-1] = replace(pieces[-1], forward_done=1.0)
    return [
        *rest,
        *(replace(interval, gradients_ready=1.0) for interval in before),
        *pieces,
    ]
