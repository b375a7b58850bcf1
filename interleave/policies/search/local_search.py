"""The local search over assignments: makes random changes of roles and orders, and
takes the ones that do not cost much."""

from collections import deque
from dataclasses import replace
from random import Random

from ebbtide.interleave.policies.search.assignment import (
    ROLES,
    Assignment,
    Role,
    other_cpu_shares,
)
from ebbtide.interleave.policies.search.plan_costs import INFINITE, PlanCosts

# Without clipping: for how many kept gradients memory may be set aside.
_GRADIENTS_IN_FLIGHT = (0, 1, 2)
# A change is taken if the cost is no higher than this many changes ago (late acceptance
# hill climbing, Burke and Bykov, "The late acceptance hill-climbing heuristic", 2017).
_MEMORY_LENGTH = 12
# With at most this many subgroups, a climb seldom leaves the roles that it begins with:
# it is begun anew as long as work is left.
_FEW_SUBGROUPS = 8
# A climb ends after this many changes in a row that gave no new best plan.
_PATIENCE = 120


class LocalSearch:
    """Improves assignments by changing one thing at a time, until one costs no more
    than `target_s`.

    The same input gives the same result.
    """

    def __init__(self, costs: PlanCosts, target_s: float) -> None:
        self._costs = costs
        self._target_s = target_s
        self._random = Random(0)

    def run(self, starts: list[Assignment]) -> Assignment:
        """Return the best assignment found from the starts.

        Of few subgroups, it is then sought from random changes of the best.
        """
        best = min(starts, key=self._costs.cost)
        best_cost = self._costs.cost(best)
        is_small = len(self._costs.workload.subgroups) <= _FEW_SUBGROUPS
        remaining = deque(starts)
        while (remaining or is_small) and not self._done(best_cost):
            start = remaining.popleft() if remaining else self._perturbed(best)
            improved, cost = self._climb(start)
            if cost < best_cost:
                best, best_cost = improved, cost
        return best

    def _perturbed(self, assignment: Assignment) -> Assignment:
        """Return the assignment with other roles of about half of the subgroups."""
        count = len(self._costs.workload.subgroups)
        for _ in range(1 + count // 2):
            subgroup, role = self._random.randrange(count), self._random.choice(ROLES)
            assignment = self._with_role(assignment, subgroup, role)
        return assignment

    def _done(self, best_cost: float) -> bool:
        return self._costs.ops_left <= 0 or best_cost <= self._target_s

    def _climb(self, start: Assignment) -> tuple[Assignment, float]:
        """Return the best of a sequence of assignments, and its cost.

        Each is a change of the one before it.
        """
        best = current = start
        best_cost = cost = self._costs.cost(start)
        memory = [cost] * _MEMORY_LENGTH
        step = since_best = 0
        while since_best < _PATIENCE and not self._done(best_cost):
            limit = max(memory[step % _MEMORY_LENGTH], cost)
            changed, changed_cost = self._fitting(
                self._changed(current), limit * (1 + 1e-12)
            )
            if changed_cost <= limit:
                current, cost = changed, changed_cost
            memory[step % _MEMORY_LENGTH] = cost
            step, since_best = step + 1, since_best + 1
            if cost < best_cost:
                best, best_cost, since_best = current, cost, 0
        return best, best_cost

    def _fitting(
        self, assignment: Assignment, limit: float
    ) -> tuple[Assignment, float]:
        """Return an assignment that fits, with fewer kept gradients if these take too
        much memory, and its cost."""
        cost = self._costs.cost(assignment, limit)
        if (
            cost < INFINITE
            or self._costs.workload.needs_all_gradients
            or not self._costs.memory.holds(assignment)
        ):
            return assignment, cost
        without_gradients = replace(
            assignment, round_trips=frozenset(assignment.resident + assignment.moved)
        )
        return without_gradients, self._costs.cost(without_gradients, limit)

    def _changed(self, assignment: Assignment) -> Assignment:
        """Return the assignment with a random change."""
        draw = self._random
        count = len(self._costs.workload.subgroups)
        kind = draw.randrange(10)
        if kind < 4:
            return self._with_role(
                assignment, draw.randrange(count), draw.choice(ROLES)
            )
        if kind < 6:
            return assignment.swapped(draw.randrange(count), draw.randrange(count))
        if kind < 7:
            if draw.random() < 0.5:
                return replace(assignment, moved=self._reordered(assignment.moved))
            return replace(assignment, on_cpu=self._reordered(assignment.on_cpu))
        if kind < 8:
            slots = assignment.slots + draw.choice((-1, 1))
            return replace(
                assignment, slots=min(max(slots, 1), max(1, len(assignment.moved)))
            )
        if kind < 9:
            return self._with_round_trips(assignment)
        return self._with_other_setting(assignment)

    def _with_other_setting(self, assignment: Assignment) -> Assignment:
        """Return the assignment with a random change of what is no role or order."""
        draw = self._random
        count = len(self._costs.workload.subgroups)
        if self._costs.cpu_slows_copies and draw.random() < 0.5:
            return replace(
                assignment,
                cpu_share=draw.choice(other_cpu_shares(assignment.cpu_share)),
            )
        if self._costs.overlap.backward and draw.random() < 0.5:
            speculated = assignment.speculated + draw.choice((-2, -1, 1, 2))
            return replace(assignment, speculated=min(max(speculated, 0), count))
        if self._costs.overlap.forward and draw.random() < 0.2:
            return replace(assignment, moved_late=not assignment.moved_late)
        if draw.random() < 0.5 and not self._costs.workload.needs_all_gradients:
            return replace(
                assignment, gradients_in_flight=draw.choice(_GRADIENTS_IN_FLIGHT)
            )
        return replace(assignment, uploads_first=not assignment.uploads_first)

    def _reordered(self, subgroups: tuple[int, ...]) -> tuple[int, ...]:
        """Return the subgroups with one of them in another place."""
        order = list(subgroups)
        if order:
            subgroup = order.pop(self._random.randrange(len(order)))
            order.insert(self._random.randrange(len(order) + 1), subgroup)
        return tuple(order)

    def _with_round_trips(self, assignment: Assignment) -> Assignment:
        """Return the assignment with another choice of one gradient, or of all."""
        on_gpu = assignment.resident + assignment.moved
        if not on_gpu:
            return assignment
        if self._random.random() < 0.2:
            return replace(
                assignment, round_trips=frozenset(on_gpu) - assignment.round_trips
            )
        return replace(
            assignment,
            round_trips=assignment.round_trips ^ {self._random.choice(on_gpu)},
        )

    def _with_role(
        self, assignment: Assignment, subgroup: int, role: Role
    ) -> Assignment:
        """Return the assignment with another role of a subgroup.

        The subgroup takes its natural place in the order.
        """
        workload = self._costs.workload
        late = (
            assignment.late | {subgroup}
            if role in ("late", "parked")
            else assignment.late - {subgroup}
        )

        def sort_key(other: int) -> tuple[bool, int]:
            if not workload.needs_all_gradients:
                return False, -other
            if self._costs.overlap.forward:
                return False, other
            if role == "cpu":
                # The upload of the last update comes after it, so the smallest one is
                # last.
                return False, -workload.subgroups[other]
            # State that is flushed comes before state that stays.
            return other in late, other

        return assignment.with_role(subgroup, role, sort_key)
