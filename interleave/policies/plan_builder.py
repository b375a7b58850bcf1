"""PlanBuilder: assembles a plan from the ways in which one subgroup can be updated."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ebbtide.interleave.model.operations import SPECULATIVE, Hold
from ebbtide.interleave.model.plan import (
    OTHER,
    STEP,
    UPDATE,
    Op,
    OpKind,
    Plan,
    Resource,
    gradient_ready_points,
)
from ebbtide.interleave.model.workload import Workload
from ebbtide.state_bytes import MASTER_BYTES


@dataclass
class PlanBuilder:
    """Collects operations in the order in which each resource runs them.

    Call `gradients` first, then one or more methods per subgroup, then `plan`.
    `gradients` also adds the clipping, if the workload needs all gradients before any
    update.

    Attributes:
        blocking_gradients: Copy gradients as DeepSpeed did before 0.19.5: into pageable
            memory, while the backward waits.
        early: Start an update as soon as its gradient is ready, if the workload does
            not need all gradients first; otherwise updates start with the step.
        speculative: Start an update on the CPU as soon as its gradient is ready, before
            clipping has said that it is valid.
    """

    policy: str
    workload: Workload
    blocking_gradients: bool = False
    early: bool = False
    speculative: bool = False
    ops: list[Op] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sizes = self.workload.subgroups
        self._gradient_points = gradient_ready_points(self.workload)
        self.early = self.early and not self.workload.needs_all_gradients
        self.speculative = self.speculative and not self.workload.copies_at_step
        self._gradient_copies: dict[int, int] = {}
        self._clip: tuple[int, ...] = ()
        self._resident: set[int] = set()
        self._first_flushes: dict[int, int] = {}
        self._kept: set[int] = set()
        self._fetches: dict[int, int] = {}

    def add(
        self,
        kind: OpKind,
        resource: Resource,
        subgroup: int,
        bytes_per_param: float = 0.0,
        after: tuple[int, ...] = (),
        start: float = STEP,
        pageable: bool = False,
        blocking: bool = False,
        takes: float = 0.0,
        gives: float = 0.0,
        due: float | None = None,
        share: float = 1.0,
        tag: Any = None,
    ) -> int:
        """Append an operation on a share of a subgroup's parameters.

        Return its index; see `Op`.

        Args:
            blocking: Whether compute stops where the operation may start, until it has
                ended.
            due: The point of the next iteration at which compute waits for its end;
                None: it is not late.
        """
        params = self.sizes[subgroup] if subgroup >= 0 else 0
        params = params if share == 1.0 else round(share * params)
        nbytes = bytes_per_param * params
        holds = (
            Hold(start)
            if blocking
            else None
            if due is None
            else Hold(due, is_next=True)
        )
        self.ops.append(
            Op(
                kind,
                resource,
                subgroup,
                params,
                nbytes,
                start,
                after,
                pageable,
                holds,
                takes,
                gives,
                tag,
            )
        )
        return len(self.ops) - 1

    def gradients(
        self, keep: frozenset[int] = frozenset(), bytes_per_param: float | None = None
    ) -> None:
        """Copy gradients to the host as soon as they are ready.

        Copy them after the backward if they are held until then.

        Args:
            keep: Subgroups whose gradients stay on the device instead.
            bytes_per_param: Bytes of a gradient that is copied; None for those that it
                has.
        """
        width = self.workload.grad_bytes if bytes_per_param is None else bytes_per_param
        for subgroup in reversed(range(len(self.sizes))):
            if subgroup in keep:
                self._kept.add(subgroup)
            else:
                self.gradient(
                    subgroup,
                    width,
                    pageable=self.blocking_gradients,
                    blocking=self.blocking_gradients,
                )
        self.clip_copied_gradients()

    def gradient(
        self,
        subgroup: int,
        bytes_per_param: float,
        after: tuple[int, ...] = (),
        pageable: bool = False,
        blocking: bool = False,
        takes: float = 0.0,
    ) -> int:
        """Copy one gradient to the host like `gradients`.

        Return the index of the copy.
        """
        until_step = self.workload.copies_at_step
        point = UPDATE if until_step else self._gradient_points[subgroup]
        blocks = blocking and not until_step
        copy = self.add(
            "gradient down",
            "d2h",
            subgroup,
            bytes_per_param,
            after,
            point,
            pageable,
            blocks,
            takes,
        )
        self._gradient_copies[subgroup] = copy
        return copy

    def clip_copied_gradients(self) -> None:
        """Clip when all gradients are on the host, if the workload clips."""
        if self.workload.clipping:
            self._clip = (
                self.add(
                    "clip", "cpu", -1, after=tuple(self._gradient_copies.values())
                ),
            )

    def gradients_at_step(self, keep: frozenset[int], bytes_per_param: float) -> None:
        """Clip gradients on the device, in the memory of the job, and copy them to the
        host then, except for gradients to keep."""
        self._kept |= keep
        if self.workload.clipping:
            self._clip = (self.add("clip", "cpu", -1),)
        for subgroup in range(len(self.sizes)):
            if subgroup not in keep:
                copied = self.add(
                    "gradient down", "d2h", subgroup, bytes_per_param, self._clip
                )
                self._gradient_copies[subgroup] = copied

    @property
    def clip(self) -> tuple[int, ...]:
        """The index of the clipping, empty if there is none."""
        return self._clip

    def copied_gradients(self) -> tuple[int, ...]:
        """Return the indices of the copies of gradients to the host."""
        return tuple(self._gradient_copies.values())

    def on_cpu(
        self, subgroup: int, params: str = "pipelined", after: tuple[int, ...] = ()
    ) -> int:
        """Update a subgroup on the CPU, and return the index of the last operation.

        Args:
            params: How the parameters reach the device. `pipelined`: the update writes
                them in half precision, and they are uploaded from pinned memory.
                `blocking`: they are converted in a pass of its own and uploaded from
                pageable memory. `gpu-cast`: the fp32 masters are uploaded and converted
                on the GPU. Where the update reads parameters there is nothing to
                convert: it writes them.
            after: Indices of further operations to wait for.
        """
        width = self.workload.param_bytes
        update = self.update_on_cpu(subgroup, after)
        point = self.ops[update].start
        if params == "pipelined":
            return self.add("upload", "h2d", subgroup, width, (update,), point)
        if self.workload.master != "fp32":
            return self.add(
                "upload",
                "h2d",
                subgroup,
                width,
                (update,),
                pageable=params == "blocking",
            )
        if params == "gpu-cast":
            return self.upload_masters(subgroup, (update,), point)
        cast = self.add("cast", "cpu", subgroup, after=(update,))
        return self.add("upload", "h2d", subgroup, width, (cast,), pageable=True)

    def update_on_cpu(self, subgroup: int, after: tuple[int, ...] = ()) -> int:
        """Update a subgroup on the CPU and return the index of the update.

        Its parameters are uploaded separately.
        """
        is_speculative = self.speculative and bool(self._clip)
        point = (
            self._gradient_points[subgroup]
            if is_speculative
            else self._update_point(subgroup)
        )
        clip = () if is_speculative else self._clip
        inputs = (self._gradient_copies[subgroup], *clip, *after)
        tag = SPECULATIVE if is_speculative else None
        return self.add("update", "cpu", subgroup, after=inputs, start=point, tag=tag)

    def upload_masters(
        self,
        subgroup: int,
        after: tuple[int, ...],
        start: float = STEP,
        staged: bool = True,
    ) -> int:
        """Upload the fp32 masters of a subgroup, and convert them on the GPU.

        Return the index of the conversion.

        Args:
            after: Indices of the operations to wait for, its update among them.
            start: The earliest point of the iteration at which the upload may start.
            staged: Whether the masters take device memory only meanwhile; otherwise the
                plan has memory for them.
        """
        staged_bytes = MASTER_BYTES * self.sizes[subgroup] if staged else 0.0
        upload = self.add(
            "upload", "h2d", subgroup, MASTER_BYTES, after, start, takes=staged_bytes
        )
        return self.add(
            "cast", "gpu", subgroup, after=(upload,), start=start, gives=staged_bytes
        )

    def resident(self, subgroup: int, after: tuple[int, ...] = ()) -> None:
        """Update a subgroup whose state never leaves the device, on the GPU.

        Do so after further operations.
        """
        self._resident.add(subgroup)
        self._update_on_gpu(subgroup, (*self._gradient(subgroup), *after))

    def leave(self, subgroups: Iterable[int], start: float = OTHER) -> None:
        """Flush parked state, which is on the device when the iteration begins.

        Call it before `gradients`.

        Args:
            start: The earliest point of the iteration at which they may start.
        """
        for subgroup in subgroups:
            size = self.workload.state_bytes
            released = size * self.sizes[subgroup]
            self._first_flushes[subgroup] = self.add(
                "flush", "d2h", subgroup, size, start=start, gives=released
            )

    def leaving(self, subgroup: int) -> int:
        """Return the index of the flush that `leave` added for a subgroup."""
        return self._first_flushes[subgroup]

    def fetch(
        self, subgroup: int, after: tuple[int, ...] = (), start: float = STEP
    ) -> int:
        """Fetch a subgroup's state to the device; return the index of the fetch.

        Args:
            after: Indices of the operations that free the memory it needs.
            start: The earliest point of the iteration at which it may start.
        """
        size = self.workload.state_bytes
        own_flush = (
            (self._first_flushes[subgroup],) if subgroup in self._first_flushes else ()
        )
        self._fetches[subgroup] = self.add(
            "fetch",
            "h2d",
            subgroup,
            size,
            tuple({*own_flush, *after}),
            start,
            takes=size * self.sizes[subgroup],
        )
        return self._fetches[subgroup]

    def update_fetched(self, subgroup: int) -> int:
        """Update fetched state on the GPU and return the index of the update."""
        fetch = (self._fetches[subgroup],)
        # A gradient that takes memory of its own comes when the fetch has found room
        # for both.
        gradient = self._gradient(
            subgroup, fetch if self.returned_gradient_bytes(subgroup) else ()
        )
        return self._update_on_gpu(subgroup, (*fetch, *gradient))

    def flush(self, subgroup: int, update: int) -> int:
        """Copy state to the host after an update, and free its device memory.

        Return the index of the flush.
        """
        size = self.workload.state_bytes
        return self.add(
            "flush",
            "d2h",
            subgroup,
            size,
            (update,),
            self._update_point(subgroup),
            gives=size * self.sizes[subgroup],
        )

    def through_gpu(self, subgroup: int, after: tuple[int, ...] = ()) -> int:
        """Fetch, update on the GPU and flush a subgroup within the update.

        Return the index of the flush; see `fetch`.
        """
        self.fetch(subgroup, after)
        return self.flush(subgroup, self.update_fetched(subgroup))

    def _gradient(self, subgroup: int, after: tuple[int, ...] = ()) -> tuple[int, ...]:
        """Return the inputs of an update on the GPU: the gradient, copied back if it
        was copied down, and clipping."""
        if subgroup in self._kept:
            return self._clip
        inputs, point = (
            (self._gradient_copies[subgroup], *self._clip, *after),
            self._update_point(subgroup),
        )
        width, size = self.workload.grad_bytes, self.returned_gradient_bytes(subgroup)
        up = self.add("gradient up", "h2d", subgroup, width, inputs, point, takes=size)
        return (up, *self._clip)

    def _update_on_gpu(self, subgroup: int, inputs: tuple[int, ...]) -> int:
        released = self.returned_gradient_bytes(subgroup)
        return self.add(
            "update",
            "gpu",
            subgroup,
            after=inputs,
            start=self._update_point(subgroup),
            gives=released,
        )

    def returned_gradient_bytes(self, subgroup: int) -> float:
        """Return the device memory that an update on the GPU needs for its gradient, if
        that was copied to the host."""
        return (
            0.0
            if subgroup in self._kept
            else self.workload.returned_gradient_bytes * self.sizes[subgroup]
        )

    def _update_point(self, subgroup: int) -> float:
        return self._gradient_points[subgroup] if self.early else STEP

    def plan(self, validate: bool = True) -> Plan:
        """Return the plan.

        Args:
            validate: Whether to check it. Only a search that makes many plans and
                checks the one it takes does not.

        Raises:
            PlanError: The plan is not valid (see `Plan.validate`).
        """
        resident_bytes = self.workload.state_bytes * sum(
            self.sizes[s] for s in self._resident
        )
        plan = Plan(
            policy=self.policy,
            ops=tuple(self.ops),
            subgroups=len(self.sizes),
            resident=frozenset(self._resident),
            parked=frozenset(self._first_flushes),
            kept_gradients=frozenset(self._kept),
            resident_bytes=resident_bytes,
        )
        return plan.validate(self.workload) if validate else plan
