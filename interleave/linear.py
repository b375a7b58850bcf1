"""Linear programs with a few integers, solved by branching over linear ones.

HiGHS' own integer solver stays out of it: of some hundred programs of the bound's kind it crashed the interpreter on
one (scipy 1.17.1), and on others it printed to stdout past Python.
"""

from __future__ import annotations

import math
from heapq import heappop, heappush
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

Vector = np.ndarray[Any, Any]
# An integer that is nearer to a whole number than this is one.
_WHOLE = 1e-6
# Each takes a millisecond or two. What is found after so many is a bound of the program still, a lower one.
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
        cost, limits = np.zeros(len(self._upper)), self._limits()
        cost[variable] = 1.0
        lower, upper = np.zeros(len(self._upper)), np.array(self._upper)
        left: list[tuple[float, int, Vector, Vector, Vector]] = []
        tried = 0

        def relax(lower: Vector, upper: Vector) -> None:
            nonlocal tried
            tried += 1
            found = milp(cost, bounds=Bounds(lower, upper), constraints=limits)
            if found.success:
                heappush(left, (found.fun, tried, found.x, lower, upper))

        relax(lower, upper)
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

    def _limits(self) -> LinearConstraint:
        entries = [(row, *entry) for row, (terms, _, _) in enumerate(self._rows) for entry in terms.items()]
        rows, columns, factors = zip(*entries, strict=True)
        matrix = csr_array((factors, (rows, columns)), shape=(len(self._rows), len(self._upper)))
        return LinearConstraint(matrix, [row[1] for row in self._rows], [row[2] for row in self._rows])
