"""Linear programs with a few integers, solved by branching over linear ones.

HiGHS' own integer solver stays out of it: of some hundred programs of the bound's kind it crashed the interpreter on
one (HiGHS 1.12 in scipy 1.17.1), and on others it printed to stdout past Python.
"""

from __future__ import annotations

import math
from heapq import heappop, heappush
from typing import Any

import numpy as np
from highspy import Highs, HighsLp, HighsModelStatus, MatrixFormat

Vector = np.ndarray[Any, Any]
# An integer that is nearer to a whole number than this is one.
_WHOLE = 1e-6
# Each takes a millisecond or less. The result after so many is still a bound of the program, a lower one.
_MOST_RELAXATIONS = 200


class LinearProgram:
    """Variables from 0 up, rows over them, and one of the variables to be made as small as can be."""

    def __init__(self) -> None:
        self._names: dict[tuple[str, int], int] = {}
        self._upper: list[float] = []
        self._integer: list[int] = []
        self._rows: list[tuple[dict[int, float], float, float]] = []

    def new(self, name: str, index: int = 0, upper: float = math.inf, whole: bool = False) -> int:
        """A further variable; whole: an integer."""
        self._names[name, index] = variable = len(self._upper)
        self._upper.append(upper)
        if whole:
            self._integer.append(variable)
        return variable

    def var(self, name: str, index: int = 0) -> int:
        return self._names[name, index]

    def limit(self, variable: int, most: float) -> None:
        self._upper[variable] = min(self._upper[variable], most)

    def row(self, terms: dict[int, float], least: float = -math.inf, most: float = math.inf) -> None:
        """`least` <= the sum of factor x variable <= `most`."""
        self._rows.append((terms, least, most))

    def solution(self, variable: int) -> Vector | None:
        """The values of all variables where this one is least, None where the rows leave none. Of the relaxations that
        are still open the least goes on, so that the first whose integers are whole is the best."""
        solver = self._solver(variable)
        variables = np.arange(len(self._upper), dtype=np.int32)
        left: list[tuple[float, int, Vector, Vector, Vector]] = []
        tried = 0

        def relax(lower: Vector, upper: Vector) -> None:
            nonlocal tried
            tried += 1
            solver.changeColsBounds(len(variables), variables, lower, upper)
            solver.run()
            if solver.getModelStatus() == HighsModelStatus.kOptimal:
                values = np.array(solver.getSolution().col_value)
                heappush(left, (float(values[variable]), tried, values, lower, upper))

        relax(np.zeros(len(self._upper)), np.array(self._upper))
        while left:
            _, _, at, lower, upper = heappop(left)
            broken = [i for i in self._integer if abs(at[i] - round(at[i])) > _WHOLE]
            if not broken or tried >= _MOST_RELAXATIONS:
                return at
            below, above = upper.copy(), lower.copy()
            below[broken[0]], above[broken[0]] = math.floor(at[broken[0]]), math.ceil(at[broken[0]])
            relax(lower, below)
            relax(above, upper)
        return None

    def _solver(self, variable: int) -> Highs:
        """HiGHS with this program, to make a variable as small as can be."""
        program = HighsLp()
        program.num_col_, program.num_row_ = len(self._upper), len(self._rows)
        cost = np.zeros(len(self._upper))
        cost[variable] = 1.0
        program.col_cost_ = cost
        program.col_lower_, program.col_upper_ = np.zeros(len(self._upper)), np.array(self._upper)
        program.row_lower_ = np.array([row[1] for row in self._rows])
        program.row_upper_ = np.array([row[2] for row in self._rows])
        matrix = program.a_matrix_
        matrix.format_ = MatrixFormat.kRowwise
        matrix.start_ = np.cumsum([0, *(len(terms) for terms, _, _ in self._rows)], dtype=np.int32)
        matrix.index_ = np.array([column for terms, _, _ in self._rows for column in terms], dtype=np.int32)
        matrix.value_ = np.array([factor for terms, _, _ in self._rows for factor in terms.values()])
        solver = Highs()
        solver.setOptionValue("output_flag", False)
        solver.setOptionValue("threads", 1)
        solver.passModel(program)
        return solver
