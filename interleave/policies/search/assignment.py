"""Assignments: where the state of each subgroup is kept and updated, and in which order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

Role = Literal["cpu", "resident", "streamed", "early", "late", "parked"]
ROLES: tuple[Role, ...] = ("cpu", "resident", "streamed", "early", "late", "parked")
# Shares of the CPU's update rate that the search considers, and factors of the share that it has.
CPU_SHARES = (1.0, 0.75, 0.5, 0.375, 0.25, 0.125)
_NEAR_FACTORS = (0.84, 0.92, 1.09, 1.19)
_LEAST_CPU_SHARE = 0.05


@dataclass(frozen=True)
class Assignment:
    """The roles of all subgroups, and the orders of their updates.

    Attributes:
        on_cpu: Subgroups that the CPU updates, in this order.
        moved: Subgroups whose state is fetched, updated on the GPU and flushed, in the order of their updates.
        resident: Subgroups whose state never leaves the device, in the order of their updates.
        early: Moved subgroups that are fetched before the update, as soon as there is memory for all of them.
        late: Moved subgroups that are flushed at the start of the next iteration. Early and late ones are parked: their
            state leaves the device for the forward only.
        round_trips: Subgroups of the GPU whose gradients are copied down and back up, even if there is memory for them.
        slots: How many moved subgroups are on the device at once, at most.
        gradients_in_flight: Without clipping: for how many kept gradients memory is set aside at a time. The simulator
            tells whether that is enough.
        uploads_first: Whether uploads of updated parameters come before fetches on the link, if both are ready.
        cpu_share: The share of the CPU's update rate that is used (see `Plan`).
        speculated: Where updates may run in the backward: how many of the last subgroups of the CPU do.
        moved_late: Where updates may end in the next forward: whether those of moved subgroups do.
    """

    on_cpu: tuple[int, ...]
    moved: tuple[int, ...]
    resident: tuple[int, ...]
    early: frozenset[int] = frozenset()
    late: frozenset[int] = frozenset()
    round_trips: frozenset[int] = frozenset()
    slots: int = 1
    gradients_in_flight: int = 2
    uploads_first: bool = True
    cpu_share: float = 1.0
    moved_late: bool = True
    speculated: int = 0

    def role(self, subgroup: int) -> Role:
        """Return the role of a subgroup."""
        if subgroup in self.moved:
            early, late = subgroup in self.early, subgroup in self.late
            return "parked" if early and late else "early" if early else "late" if late else "streamed"
        return "resident" if subgroup in self.resident else "cpu"

    def with_role(self, subgroup: int, role: Role, sort_key: Callable[[int], tuple[bool, int]]) -> Assignment:
        """Return the assignment with another role of a subgroup.

        Args:
            subgroup: The subgroup.
            role: Its role.
            sort_key: Key of the order in which it takes its place among the others of its kind.
        """

        def place(subgroups: tuple[int, ...], belongs: bool) -> tuple[int, ...]:
            others = [other for other in subgroups if other != subgroup]
            if belongs:
                own_key = sort_key(subgroup)
                others.insert(sum([sort_key(other) < own_key for other in others]), subgroup)
            return tuple(others)

        single = frozenset({subgroup})
        early = self.early | single if role in ("early", "parked") else self.early - single
        late = self.late | single if role in ("late", "parked") else self.late - single
        return replace(
            self,
            on_cpu=place(self.on_cpu, role == "cpu"),
            moved=place(self.moved, role not in ("cpu", "resident")),
            resident=place(self.resident, role == "resident"),
            early=early,
            late=late,
            round_trips=self.round_trips - single if role == "cpu" else self.round_trips,
            slots=max(1, self.slots, len(early), len(late)),
        )

    def swapped(self, one: int, other: int) -> Assignment:
        """Return the assignment in which two subgroups have changed places."""
        exchange = {one: other, other: one}

        def renamed(subgroups: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(exchange.get(subgroup, subgroup) for subgroup in subgroups)

        return replace(
            self,
            on_cpu=renamed(self.on_cpu),
            moved=renamed(self.moved),
            resident=renamed(self.resident),
            early=frozenset(renamed(tuple(self.early))),
            late=frozenset(renamed(tuple(self.late))),
            round_trips=frozenset(renamed(tuple(self.round_trips))),
        )


def other_cpu_shares(share: float) -> tuple[float, ...]:
    """Return shares of the CPU's update rate to try in place of one: some of the whole range, and some near it."""
    near = (min(max(share * factor, _LEAST_CPU_SHARE), 1.0) for factor in _NEAR_FACTORS)
    return (*CPU_SHARES, *near)
