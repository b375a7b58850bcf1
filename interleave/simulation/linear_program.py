"""Linear programs with a few integer variables, solved by branch and bound over HiGHS' linear solver.

HiGHS' own integer solver is not used: on one of some hundred programs of the bound's kind it crashed the interpreter
(HiGHS 1.12 in scipy 1.17.1), and on others it printed to stdout past Python.
"""

from __future__ import annotations

import math
from heapq import heappop, heappush
from typing import Any, NamedTuple

import numpy as np
from highspy import Highs, HighsLp, HighsModelStatus, MatrixFormat

Vector = np.ndarray[Any, Any]
# A value nearer than this to a whole number counts as whole.
_INTEGER_TOLERANCE = 1e-6
# Each relaxation takes a millisecond or less. The result after so many is still a bound of the program, a lower one.
_MAX_RELAXATIONS = 200


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


class _SilentHighs(Highs):  # type: ignore[misc]
    """HiGHS that prints nothing, not even the line with its version, which its constructor prints since 1.16."""

    def enableCallbacks(self) -> None:
        """Enable callbacks, as the constructor does before anything else that could print."""
        self.setOptionValue("output_flag", False)
        super().enableCallbacks()


class LinearProgram:
    """Variables with a lower bound of 0, rows that constrain them, and one variable to minimise."""

    def __init__(self) -> None:
        self._variables: dict[tuple[str, int], int] = {}
        self._upper: list[float] = []
        self._integers: list[int] = []
        self._rows: list[_Row] = []

    def add_variable(self, name: str, index: int = 0, upper: float = math.inf, integer: bool = False) -> int:
        """Add a variable and return its number.

        Args:
            name: Name to look it up by.
            index: Index to look it up by, for variables that share a name.
            upper: Largest value allowed.
            integer: Whether its value must be a whole number.
        """
        self._variables[name, index] = variable = len(self._upper)
        self._upper.append(upper)
        if integer:
            self._integers.append(variable)
        return variable

    def variable(self, name: str, index: int = 0) -> int:
        """Return the number of a variable."""
        return self._variables[name, index]

    def limit(self, variable: int, upper: float) -> None:
        """Lower the largest value allowed of a variable."""
        self._upper[variable] = min(self._upper[variable], upper)

    def add_row(self, terms: dict[int, float], lower: float = -math.inf, upper: float = math.inf) -> None:
        """Add the constraint `lower` <= sum of factor x variable <= `upper`.

        Args:
            terms: Factor of each variable, by its number.
            lower: Smallest sum allowed.
            upper: Largest sum allowed.
        """
        self._rows.append(_Row(terms, lower, upper))

    def minimize(self, variable: int) -> Vector | None:
        """Return the values of all variables where this one is smallest, None if no values satisfy the rows.

        The open relaxation with the smallest value is branched next, so the first one whose integers are whole is
        optimal.
        """
        solver = self._solver(variable)
        variables = np.arange(len(self._upper), dtype=np.int32)
        open_relaxations: list[_Relaxation] = []
        solved = 0

        def relax(lower: Vector, upper: Vector) -> None:
            nonlocal solved
            solved += 1
            solver.changeColsBounds(len(variables), variables, lower, upper)
            solver.run()
            if solver.getModelStatus() == HighsModelStatus.kOptimal:
                values = np.array(solver.getSolution().col_value)
                heappush(open_relaxations, _Relaxation(float(values[variable]), solved, values, lower, upper))

        relax(np.zeros(len(self._upper)), np.array(self._upper))
        while open_relaxations:
            _, _, values, lower, upper = heappop(open_relaxations)
            fractional = [i for i in self._integers if abs(values[i] - round(values[i])) > _INTEGER_TOLERANCE]
            if not fractional or solved >= _MAX_RELAXATIONS:
                return values
            branch = fractional[0]
            below, above = upper.copy(), lower.copy()
            below[branch], above[branch] = math.floor(values[branch]), math.ceil(values[branch])
            relax(lower, below)
            relax(above, upper)
        return None

    def _solver(self, variable: int) -> Highs:
        """Return HiGHS with this program, set to minimise a variable."""
        program = HighsLp()
        program.num_col_, program.num_row_ = len(self._upper), len(self._rows)
        cost = np.zeros(len(self._upper))
        cost[variable] = 1.0
        program.col_cost_ = cost
        program.col_lower_, program.col_upper_ = np.zeros(len(self._upper)), np.array(self._upper)
        program.row_lower_ = np.array([row.lower for row in self._rows])
        program.row_upper_ = np.array([row.upper for row in self._rows])
        matrix = program.a_matrix_
        matrix.format_ = MatrixFormat.kRowwise
        matrix.start_ = np.cumsum([0, *(len(row.terms) for row in self._rows)], dtype=np.int32)
        matrix.index_ = np.array([column for row in self._rows for column in row.terms], dtype=np.int32)
        matrix.value_ = np.array([factor for row in self._rows for factor in row.terms.values()])
        solver = _SilentHighs()
        solver.setOptionValue("threads", 1)
        solver.passModel(program)
        return solver
