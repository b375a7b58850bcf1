"""What policies make plans of: the ways in which one subgroup can be handled."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ebbtide.interleave.model.plan import OTHER, STEP, UPDATE, Kind, Op, Plan, Resource, made_points
from ebbtide.interleave.model.workload import Workload


@dataclass
class PlanBuilder:
    """Collects operations in the order in which each resource takes them.

    Gradients come first, as the backward makes them; then `clip` where the workload needs all of them before any
    update; then the updates. blocking_gradients: they come down as DeepSpeed did it before 0.19.5, into pageable
    memory while the backward waits. early: updates begin as soon as their gradient is there, where no clipping keeps
    them from it; else when the step begins."""

    policy: str
    workload: Workload
    blocking_gradients: bool = False
    early: bool = False
    ops: list[Op] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sizes = self.workload.subgroups
        self._made = made_points(self.workload)
        self.early = self.early and not self.workload.waits
        self._down: dict[int, int] = {}
        self._clip: tuple[int, ...] = ()
        self._resident: set[int] = set()
        self._leaving: dict[int, int] = {}
        self._kept: set[int] = set()
        self._fetches: dict[int, int] = {}

    def add(
        self,
        kind: Kind,
        resource: Resource,
        subgroup: int,
        bytes_per_param: float = 0.0,
        after: tuple[int, ...] = (),
        point: float = STEP,
        pageable: bool = False,
        blocking: bool = False,
        acquire: float = 0.0,
        release: float = 0.0,
    ) -> int:
        """Append an operation and return its index."""
        params = self.sizes[subgroup] if subgroup >= 0 else 0
        nbytes = bytes_per_param * params
        self.ops.append(
            Op(kind, resource, subgroup, params, nbytes, point, after, pageable, blocking, acquire, release)
        )
        return len(self.ops) - 1

    def gradients(self, keep: frozenset[int] = frozenset()) -> None:
        """Bring down the gradients of all subgroups but those in `keep`, as the backward makes them, or as
        it is over where they stay until then."""
        for subgroup in reversed(range(len(self.sizes))):
            point = UPDATE if self.workload.gradients_stay else self._made[subgroup]
            if subgroup in keep:
                self._kept.add(subgroup)
                continue
            self._down[subgroup] = self.add(
                "gradient down",
                "d2h",
                subgroup,
                self.workload.grad_bytes,
                point=point,
                pageable=self.blocking_gradients,
                blocking=self.blocking_gradients and not self.workload.gradients_stay,
            )
        if self.workload.clipping:
            self._clip = (self.add("clip", "cpu", -1, after=tuple(self._down.values())),)

    def on_cpu(self, subgroup: int, blocking_upload: bool = False, after: tuple[int, ...] = ()) -> int:
        """Update on the CPU; returns the upload. blocking_upload: the half-precision copy is made by a pass of its
        own and goes up from pageable memory; else the update writes it and it goes up from pinned memory."""
        width = self.workload.param_bytes
        waits = (self._down[subgroup], *self._clip, *after)
        point = self._step(subgroup)
        update = self.add("update", "cpu", subgroup, after=waits, point=point)
        if not blocking_upload:
            return self.add("upload", "h2d", subgroup, width, (update,), point)
        cast = self.add("cast", "cpu", subgroup, after=(update,))
        return self.add("upload", "h2d", subgroup, width, (cast,), pageable=True)

    def resident(self, subgroup: int) -> None:
        """Update on the GPU; the state never leaves it."""
        self._resident.add(subgroup)
        self.add("update", "gpu", subgroup, after=self._gradient(subgroup), point=self._step(subgroup))

    def leave(self, subgroups: Iterable[int]) -> None:
        """State that is on the device when the iteration begins leaves it at once. To be called before `gradients`."""
        for subgroup in subgroups:
            size = self.workload.state_bytes
            room = size * self.sizes[subgroup]
            self._leaving[subgroup] = self.add("flush", "d2h", subgroup, size, point=OTHER, release=room)

    def leaving(self, subgroup: int) -> int:
        """The flush with which a subgroup's state leaves at the start of the iteration."""
        return self._leaving[subgroup]

    def fetch(self, subgroup: int, after: tuple[int, ...] = (), point: float = STEP) -> int:
        """Fetch state; returns the fetch. after: what gives it its room."""
        size = self.workload.state_bytes
        gone = (self._leaving[subgroup],) if subgroup in self._leaving else ()
        self._fetches[subgroup] = self.add(
            "fetch", "h2d", subgroup, size, tuple({*gone, *after}), point, acquire=size * self.sizes[subgroup]
        )
        return self._fetches[subgroup]

    def update_fetched(self, subgroup: int) -> int:
        """Update fetched state on the GPU; returns the update."""
        waits = (self._fetches[subgroup], *self._gradient(subgroup))
        return self.add("update", "gpu", subgroup, after=waits, point=self._step(subgroup))

    def flush(self, subgroup: int, update: int) -> int:
        """Send updated state back; returns the flush, which gives its room to others."""
        size = self.workload.state_bytes
        return self.add(
            "flush", "d2h", subgroup, size, (update,), self._step(subgroup), release=size * self.sizes[subgroup]
        )

    def through_gpu(self, subgroup: int, after: tuple[int, ...] = ()) -> int:
        """Fetch, update on the GPU, flush, all within the update; returns the flush. after: what gives it its room."""
        self.fetch(subgroup, after)
        return self.flush(subgroup, self.update_fetched(subgroup))

    def _gradient(self, subgroup: int) -> tuple[int, ...]:
        """What an update on the GPU waits for: its gradient, brought back up if it went down, and the clipping."""
        if subgroup in self._kept:
            return self._clip
        down = (self._down[subgroup], *self._clip)
        up = self.add("gradient up", "h2d", subgroup, self.workload.grad_bytes, down, self._step(subgroup))
        return (up, *self._clip)

    def _step(self, subgroup: int) -> float:
        """Where the update of a subgroup may begin."""
        return self._made[subgroup] if self.early else STEP

    def plan(self) -> Plan:
        """The plan, checked."""
        held = self.workload.state_bytes * sum(self.sizes[s] for s in self._resident)
        return Plan(
            policy=self.policy,
            ops=tuple(self.ops),
            subgroups=len(self.sizes),
            resident=frozenset(self._resident),
            parked=frozenset(self._leaving),
            kept_gradients=frozenset(self._kept),
            held_bytes=held,
        ).validate(self.workload)
