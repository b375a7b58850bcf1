"""Storage for what host memory does not hold: when it is used, which state is there,
and its reads and writes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush

from ebbtide.interleave.model.kinds import find_kind, from_backward
from ebbtide.interleave.model.operations import Hold, numbered_lane
from ebbtide.interleave.model.plan import BACKWARD, Op, OpKind, Plan, Resource
from ebbtide.interleave.model.schedule import (
    available_host_bytes,
    exceeds_host,
    needed_host_bytes,
)
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.simulation.simulator import simulate_steps
from ebbtide.machines.machine import Machine, StoragePath
from ebbtide.units import bytes_text, counted

# Below all indices of operations.
_SPECULATIVE_PLACE = -(10**9)
# Versions of each state in storage: the one of the last whole step, and the one that is
# written.
STORED_VERSIONS = 2


@dataclass(frozen=True)
class StorageLayout:
    """A choice of which state is in storage, and of the buffers for it.

    State passes through these.
    """

    # Which subgroups, in the order of their updates: evenly `spread`, the `first` or
    # the `last` ones.
    placement: str
    buffers: int  # How many of them may be in host memory at once, of each path.
    # How many paths of the storage are used, the fastest ones; None: all.
    paths: int | None = None


def stored_in(
    plan: Plan, workload: Workload, machine: Machine, layout: StorageLayout
) -> Plan:
    """Return a plan, not validated, whose state is in storage where host memory does
    not hold it.

    Reads may begin with the backward; the last write of each buffer is due when the
    next backward begins.
    """
    chains = _Chains(plan, workload, machine, layout)
    return (
        replace(plan, ops=tuple(chains.ops()), storage_buffers=chains.buffer_bytes)
        if chains.path_of
        else plan
    )


class _Chains:
    """Inserts the storage read and write of each subgroup into a plan's operations.

    Only subgroups in storage have them.
    """

    def __init__(
        self, plan: Plan, workload: Workload, machine: Machine, layout: StorageLayout
    ) -> None:
        self._plan = plan
        self._state_bytes = [workload.state_bytes * size for size in workload.subgroups]
        self._uses = _uses_in_order(plan)
        available = available_host_bytes(workload, machine) or 0.0
        in_host = {
            subgroup: self._state_bytes[subgroup]
            * (2 if subgroup in plan.speculated else 1)
            for subgroup in self._uses
        }
        # Of state that is neither resident nor can be in storage.
        fixed = needed_host_bytes(plan, workload) - sum(in_host.values())
        order = list(self._uses)
        few, most = 0, len(order)
        while few < most:
            count = (few + most) // 2
            chosen = _paths(
                _chosen(order, count, layout.placement),
                self._state_bytes,
                machine.storage,
                layout.paths,
            )
            kept = sum(in_host.values()) - sum(in_host[subgroup] for subgroup in chosen)
            if (
                fixed + kept + sum(self._with_buffers(chosen, layout.buffers))
                <= available
            ):
                most = count
            else:
                few = count + 1
        stored = _chosen(order, most, layout.placement)
        self.path_of = _paths(stored, self._state_bytes, machine.storage, layout.paths)
        self.buffer_bytes = self._with_buffers(self.path_of, layout.buffers)

    def _with_buffers(
        self, path_of: Mapping[int, int], count: int
    ) -> tuple[float, ...]:
        """Give each subgroup in storage a buffer and return the bytes of the buffers.
        Each path has its own, at least as many as subgroups that the plan has on their
        way through the device at once. An update of this iteration cannot wait for a
        buffer that a late one frees: if any comes after a late one, both kinds have
        their own."""
        stored = list(path_of)
        late = [subgroup for subgroup in stored if self._uses[subgroup].late]
        on_time = [subgroup for subgroup in stored if not self._uses[subgroup].late]
        mixed = bool(late and on_time) and stored.index(late[0]) < stored.index(
            on_time[-1]
        )
        groups: dict[tuple[int, bool], list[int]] = {}
        for subgroup, path in path_of.items():
            groups.setdefault((path, mixed and self._uses[subgroup].late), []).append(
                subgroup
            )
        self._buffer_of: dict[int, int] = {}
        sizes: list[float] = []
        for group in groups.values():
            # Last places at which each buffer is used, the first one to become free
            # first.
            used: list[tuple[int, int]] = []
            for subgroup in group:
                use = self._uses[subgroup]
                if len(used) < count or used[0][0] >= use.place:
                    buffer = len(sizes)
                    sizes.append(0.0)
                else:
                    buffer = heappop(used)[1]
                heappush(used, (use.last_place, buffer))
                self._buffer_of[subgroup] = buffer
                sizes[buffer] = max(sizes[buffer], self._state_bytes[subgroup])
        return tuple(sizes)

    def ops(self) -> list[Op]:
        """Return the operations with reads and writes.

        Their order respects what they wait for.
        """
        plan = self._plan
        self._last_of_buffer = {
            self._buffer_of[subgroup]: subgroup for subgroup in self.path_of
        }
        stored_and_speculated = self.path_of.keys() & plan.speculated
        speculative = [
            use.first
            for subgroup, use in self._uses.items()
            if subgroup in stored_and_speculated
        ]
        clip = next(
            (index for index, op in enumerate(plan.ops) if op.kind == "clip"), -1
        )
        self._clip = clip
        self._new: list[Op] = []
        self._index: dict[int, int] = {}
        self._reads: dict[int, int] = {}
        self._writes_of_buffers: dict[int, int] = {}
        for index in range(len(plan.ops)):
            if index not in self._index:
                self._emit(index)
            if index == clip:
                # Their buffers are the first to be used, whatever their place among the
                # updates of the step.
                for update in speculative:
                    self._emit(update)
        # The last write of a buffer is late.
        return list(map(from_backward, self._new))

    def _emit(self, index: int) -> None:
        """Append an operation, with a read if it is the first to use state in storage,
        a write if it is the last."""
        op = self._plan.ops[index]
        use = self._uses.get(op.subgroup) if op.subgroup in self.path_of else None
        after = tuple(self._index[before] for before in op.after)
        if use is not None and index == use.first:
            self._reads[op.subgroup] = self._read(op)
        if use is not None and (
            op.kind == "fetch" or (op.kind == "update" and op.resource == "cpu")
        ):
            after = (*after, self._reads[op.subgroup])
        self._index[index] = len(self._new)
        self._new.append(op._replace(after=after))
        if use is not None and index == use.last:
            buffer = self._buffer_of[op.subgroup]
            due = (
                BACKWARD
                if op.is_late or self._last_of_buffer[buffer] == op.subgroup
                else None
            )
            self._writes_of_buffers[buffer] = len(self._new)
            # Until then the file has the state that a speculative update is computed
            # again from.
            valid = (self._index[self._clip],) if use.speculative else ()
            after = tuple(dict.fromkeys((self._index[index], *valid)))
            self._new.append(
                self._transfer("write", "storage_write", op, op.start, after, due)
            )

    def _read(self, consumer: Op) -> int:
        """Append the read that an operation needs and return its index."""
        before = self._writes_of_buffers.get(self._buffer_of[consumer.subgroup])
        after = () if before is None else (before,)
        due = consumer.due if before is not None and self._new[before].is_late else None
        self._new.append(
            self._transfer("read", "storage_read", consumer, BACKWARD, after, due)
        )
        return len(self._new) - 1

    def _transfer(
        self,
        kind: OpKind,
        resource: Resource,
        user: Op,
        start: float,
        after: tuple[int, ...],
        due: float | None,
    ) -> Op:
        own, nbytes = user.subgroup, self._state_bytes[user.subgroup]
        lane, holds = (
            numbered_lane(resource, self.path_of[own]),
            None if due is None else Hold(due, is_next=True),
        )
        return Op(
            kind,
            lane,
            own,
            user.params,
            nbytes,
            start,
            after,
            holds=holds,
            tag=self._buffer_of[own],
        )


@dataclass
class _Use:
    """The operations between which a subgroup's state is used in host memory."""

    first: int
    last: int
    late: bool  # Whether the first one may end in the next iteration.
    # Whether it is a speculative update. These come right after clipping, before all
    # others.
    speculative: bool

    @property
    def place(self) -> int:
        """Sort key of the order in which subgroups are read."""
        return _SPECULATIVE_PLACE + self.first if self.speculative else self.first

    @property
    def last_place(self) -> int:
        """Sort key of the last operation, in the same order.

        The last operation comes after clipping unless it is the first one.
        """
        return self.place if self.last == self.first else self.last


def _uses_in_order(plan: Plan) -> dict[int, _Use]:
    """Return the subgroups whose state may be in storage, in the order of their first
    use."""
    elsewhere = plan.resident | plan.parked
    uses: dict[int, _Use] = {}
    for index, op in enumerate(plan.ops):
        if op.subgroup in elsewhere:
            continue
        if op.kind == "fetch" or (op.kind == "update" and op.resource == "cpu"):
            uses[op.subgroup] = _Use(index, index, op.is_late, op.is_speculative)
        elif op.subgroup in uses and _uses_state_on_host(op, plan):
            uses[op.subgroup].last = index
    return dict(sorted(uses.items(), key=lambda entry: entry[1].place))


def _uses_state_on_host(op: Op, plan: Plan) -> bool:
    flow = find_kind(op.kind).flow(op, plan)
    return "state@host" in (*flow.reads, *flow.writes, *flow.moves)


def _chosen(order: Sequence[int], count: int, placement: str) -> list[int]:
    """Return `count` subgroups of an order."""
    if placement == "spread":
        return [
            subgroup
            for number, subgroup in enumerate(order)
            if (number + 1) * count // len(order) > number * count // len(order)
        ]
    return list(order[:count] if placement == "first" else order[len(order) - count :])


def _paths(
    subgroups: Sequence[int],
    state_bytes: Sequence[float],
    storage: Sequence[StoragePath],
    count: int | None,
) -> dict[int, int]:
    """Return the path of each subgroup.

    The fastest `count` paths are busy equally long. Subgroups that none of them has
    space for are left out.
    """
    busy_s = [0.0] * len(storage)
    free = [float("inf") if path.bytes is None else path.bytes for path in storage]
    s_per_byte = [path.s_per_byte for path in storage]
    fastest = sorted(range(len(storage)), key=s_per_byte.__getitem__)[:count]
    path_of = {}
    for subgroup in subgroups:
        size = state_bytes[subgroup]
        with_space = [
            number for number in fastest if free[number] >= STORED_VERSIONS * size
        ]
        if not with_space:
            continue
        path = min(
            with_space, key=lambda number: busy_s[number] + size * s_per_byte[number]
        )
        busy_s[path] += size * s_per_byte[path]
        free[path] -= STORED_VERSIONS * size
        path_of[subgroup] = path
    return path_of


DEFAULT_LAYOUT, SMALLEST_LAYOUT = (
    StorageLayout("spread", 3),
    StorageLayout("spread", 1, paths=1),
)


def layouts(paths: int) -> list[StorageLayout]:
    """Return the layouts that are compared.

    The machine has `paths` paths of storage.
    """
    return [
        StorageLayout(placement, buffers, number)
        for number in dict.fromkeys((paths, -(-paths // 2), 1))
        for buffers in (3, 2, 4, 6, 1)
        for placement in ("spread", "first", "last")
    ]


def with_storage(plan: Plan, workload: Workload, machine: Machine) -> Plan:
    """Return a plan with its state in storage as far as host memory does not hold it.

    Return the plan itself where it fits or has state in storage, or storage or host
    memory are not known. Of layouts that fit the one with the shortest mean iteration
    is taken, else the one that needs the least host memory.
    """
    if not _needs_storage(plan, workload, machine):
        return plan
    plans = dict.fromkeys(
        stored_in(plan, workload, machine, layout)
        for layout in layouts(len(machine.storage))
    )
    fitting = [
        candidate
        for candidate in plans
        if not exceeds_host(candidate, workload, machine)
    ]
    # If none fits, the least memory is what is missing.
    candidates = fitting or [
        min(plans, key=lambda candidate: needed_host_bytes(candidate, workload))
    ]
    best = min(
        candidates,
        key=lambda candidate: simulate_steps(candidate, workload, machine).cost(
            machine
        ),
    )
    remark = "; ".join(filter(None, (plan.remark, storage_summary(best, workload))))
    return replace(best, remark=remark).validate(workload)


def with_fitting_storage(plan: Plan, workload: Workload, machine: Machine) -> Plan:
    """Return the plan of `with_storage` with the default layout.

    Where that does not fit, return the layout that needs the least host memory.

    It is not validated, for searches that make many plans."""
    if not _needs_storage(plan, workload, machine):
        return plan
    stored = stored_in(plan, workload, machine, DEFAULT_LAYOUT)
    if not exceeds_host(stored, workload, machine):
        return stored
    return stored_in(plan, workload, machine, SMALLEST_LAYOUT)


def _needs_storage(plan: Plan, workload: Workload, machine: Machine) -> bool:
    return (
        bool(machine.storage)
        and not plan.storage_buffers
        and exceeds_host(plan, workload, machine)
    )


def storage_summary(plan: Plan, workload: Workload) -> str:
    """Return in words which state is in storage."""
    stored = plan.stored
    size = workload.state_bytes * sum(
        workload.subgroups[subgroup] for subgroup in stored
    )
    buffers = len({op.tag for op in plan.ops if op.kind == "read"})
    return (
        f"state of {len(stored)} of {plan.subgroups} subgroups ({bytes_text(size)}) in "
        "storage, through "
        f"{counted(buffers, 'buffer')} in host memory"
    )
