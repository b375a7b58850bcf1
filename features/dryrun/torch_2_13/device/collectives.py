"""Collectives of the job: their bytes and times, and their results on fake tensors."""

import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork, ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group, _world

from ebbtide.features.dryrun.errors import CannotFakeError
from ebbtide.features.dryrun.peers import Peers
from ebbtide.features.dryrun.time.clock import COMMUNICATION_STREAM, Times, VirtualClock
from ebbtide.features.dryrun.torch_2_13.operations.shadow_values import (
    MAX_ELEMENTS,
    ShadowValues,
    tensors_in,
)
from ebbtide.machines.kernels import time_priors as priors
from ebbtide.machines.kernels.rates import KernelWork
from ebbtide.machines.kernels.time_priors import WorkClass
from ebbtide.profiler.agent.patches import Patches

# Parts of the names of operations on process groups, and of their functional forms,
# without `_` -> the collective. A name counts by the first part that it has.
_KINDS = {
    "allreduce": "all_reduce",
    "broadcast": "broadcast",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "send": "send",
    "recv": "receive",
    "barrier": "barrier",
}
# Of a ring of n ranks, bytes that one rank sends per byte of the largest tensor (or
# list) that it passes.
_RING_SHARES: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    **dict.fromkeys(
        ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"),
        lambda n: (n - 1) / n,
    ),
    "barrier": lambda n: 0.0,
}
# The other ranks of the group do not take part.
_POINT_TO_POINT = ("send", "receive")
_WAIT = torch.ops._c10d_functional.wait_tensor.default
# Works that the job never waits for are forgotten.
_MAX_PENDING = 4_096
COLLECTIVE_NAMESPACES = frozenset({"c10d", "_c10d_functional", "_dtensor"})


@dataclass(frozen=True)
class _Receipt:
    """Tensors that are to be received from another rank that is run.

    Attributes:
        number: Of the message.
        posted: When the receipt was asked for.
    """

    peer: int
    number: int
    posted: Times
    work: KernelWork


class Collectives:
    """Runs collectives on fake tensors: nothing is sent, and the clock advances by the
    bytes on the wire."""

    def __init__(self, clock: VirtualClock, values: ShadowValues) -> None:
        self._clock, self._values = clock, values
        self._numbers = count(1)
        self._peers: Peers | None = None
        # Number of a work -> when it ends, and references to its tensors
        self._works: OrderedDict[int, tuple[Times | _Receipt | None, list[Any]]] = (
            OrderedDict()
        )
        # Address of the storage of a functional result -> when it is there
        self._pending: OrderedDict[int, Times] = OrderedDict()

    def install(self, patches: Patches, peers: Peers | None) -> None:
        """Give works of fake groups a future with their tensors, and let waiting take
        time, until `patches.undo()`."""
        self._peers = peers
        for owner in (dist, dist.distributed_c10d):
            patches.set(owner, "send_object_list", self._send_objects)
            patches.set(owner, "recv_object_list", self._receive_objects)
        patches.set(FakeWork, "get_future", lambda work: self._future_of(work))
        for name in ("wait", "synchronize"):
            patches.set(
                FakeWork, name, lambda work, *_args, **_kwargs: self._wait(work)
            )
        original = dist.all_reduce

        def all_reduce(
            tensor: Any,
            op: Any = dist.ReduceOp.SUM,
            group: Any = None,
            async_op: bool = False,
        ) -> Any:
            work = original(tensor, op, group, async_op)
            own = self._values.of(tensor)
            if op == dist.ReduceOp.SUM and own is not None:
                with torch.no_grad():
                    # the other ranks are taken to have the same
                    own.mul_(dist.get_world_size(group))
            return work

        for owner in (dist, dist.distributed_c10d):
            patches.set(owner, "all_reduce", all_reduce)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of an operation of the namespace `c10d`: what it writes,
        and a work."""
        inputs, written = list(tensors_in(args)), list(tensors_in(args[:1]))
        if (message := self._message(func, args, written)) is not None:
            return message
        self._follow_values(func, args, kwargs, written)
        asynchronous = _argument(func, args, kwargs, "async_op")
        done = self._launch(
            func, args, kwargs, inputs, [], asynchronous is None or bool(asynchronous)
        )
        work = self._new_work(done, written)
        results = func._schema.returns
        if not results:
            return None
        return work.boxed() if len(results) == 1 else (args[0], work.boxed())

    def _new_work(self, done: Times | _Receipt | None, tensors: list[Any]) -> Any:
        work = FakeWork()
        work.seq_id = next(self._numbers)
        self._works[work.seq_id] = done, [weakref.ref(tensor) for tensor in tensors]
        while len(self._works) > _MAX_PENDING:
            self._works.popitem(last=False)
        return work

    def _message(self, func: Any, args: Any, tensors: list[Any]) -> Any:
        """Send tensors to a rank that is run, or begin to receive them, and return the
        work; None: the operation does neither."""
        kind = _kind_of(func._schema.name)
        if kind not in _POINT_TO_POINT or not isinstance(args[2], int):
            return None
        group = _group(func, args, {})
        peer = self._peer_of(group, args[2])
        if self._peers is None or peer is None:
            return None
        size = _bytes_of(tensors)
        work = KernelWork(kind, "communication", WorkClass.COLLECTIVE, 0, size,
                          share_of_box=_share_of_box(kind, group))  # fmt: skip
        self._clock.run_host(priors.PYTHON_OPERATION_NS)
        if kind == "send":
            values = [_listed(self._values.of(tensor)) for tensor in tensors]
            self._peers.send(peer, (self._clock.record(), values))
            stream = COMMUNICATION_STREAM + 1 + 2 * peer
            done = self._clock.run_collective(work, is_async=True, stream=stream)
            return self._new_work(done, tensors).boxed()
        self._values.forget(tensors)
        posted = self._clock.record()
        receipt = _Receipt(peer, self._peers.expect(peer), posted, work)
        return self._new_work(receipt, tensors).boxed()

    def _receive(self, receipt: _Receipt, tensors: list[Any]) -> Times:
        """Wait for tensors of another rank, and return when they are there."""
        assert self._peers is not None
        message = self._peers.receive(receipt.peer, receipt.number)
        sent, values = message or (receipt.posted, [])
        stream = COMMUNICATION_STREAM + 2 + 2 * receipt.peer
        for time in (receipt.posted, sent):
            self._clock.wait(time, stream)
        self._clock.run_kernel(receipt.work, stream)
        for tensor, value in zip(tensors, values, strict=False):
            if value is not None:
                self._values.set(tensor, torch.tensor(value[0], dtype=value[1]))
        return self._clock.record(stream)

    def _peer_of(self, group: Any, rank: int | None) -> int | None:
        """Return the rank in the job of one in a group, if it is run."""
        ranks: list[int] = dist.get_process_group_ranks(group)
        if self._peers is None or len(ranks) == 1 or not self._peers.meet(ranks):
            return None
        return None if rank is None else ranks[rank]

    def _send_objects(
        self, objects: list[Any], dst: Any = None, group: Any = None,
        device: Any = None, group_dst: Any = None, use_batch: bool = False,
    ) -> None:  # fmt: skip
        if (peer := self._object_peer(group, dst, group_dst)) is not None:
            self._peers.send(peer, objects)  # type: ignore[union-attr]

    def _receive_objects(
        self, objects: list[Any], src: Any = None, group: Any = None,
        device: Any = None, group_src: Any = None, use_batch: bool = False,
    ) -> Any:  # fmt: skip
        peer = self._object_peer(group, src, group_src)
        if self._peers is None or peer is None:
            raise CannotFakeError(
                "cannot dry-run torch.distributed.recv_object_list: the object is "
                "another rank's; make it in the script itself"
            )
        objects[:] = self._peers.receive(peer, self._peers.expect(peer)) or objects
        return peer

    def _object_peer(
        self, group: Any, rank: int | None, group_rank: int | None
    ) -> int | None:
        group = group or _world.default_pg
        ranks = dist.get_process_group_ranks(group)
        if rank in ranks:
            group_rank = ranks.index(rank)
        return self._peer_of(group, group_rank)

    def account(self, func: Any, args: Any, kwargs: Any, outputs: list[Any]) -> None:
        """Account for a functional collective, which has run on fake tensors, or for
        waiting for its result."""
        if func is _WAIT:
            self._wait_for(self._pending.pop(outputs[0].untyped_storage()._cdata, None))
            return
        done = self._launch(func, args, kwargs, list(tensors_in(args)), outputs, True)
        if done is not None:
            for tensor in outputs:
                self._pending[tensor.untyped_storage()._cdata] = done
            while len(self._pending) > _MAX_PENDING:
                self._pending.popitem(last=False)

    def wait_for_all(self) -> None:
        """Make the current stream wait for every collective so far."""
        self._clock.wait(self._clock.record(COMMUNICATION_STREAM))

    def _follow_values(
        self, func: Any, args: Any, kwargs: Any, written: list[Any]
    ) -> None:
        """Compute what the tensors hold if all ranks had the values of this one."""
        sources = list(tensors_in(args[1:])) or written
        have_values = all(self._values.of(tensor) is not None for tensor in sources)
        if (
            have_values
            and not func._schema.name.startswith("c10d::recv")
            and all(tensor.numel() <= MAX_ELEMENTS for tensor in written)
        ):
            for tensor in written:
                if self._values.of(tensor) is None:
                    self._values.set(tensor, torch.zeros(()))
            if (
                self._values.compute(func, args, kwargs, [*written, *sources])
                is not None
            ):
                return
        self._values.forget(written)

    def _launch(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        inputs: list[Any],
        outputs: list[Any],
        is_async: bool,
    ) -> Times | None:
        kind = _kind_of(func._schema.name)
        if kind is None or not any(tensor.device.type == "cuda" for tensor in inputs):
            return None
        group = _group(func, args, kwargs)
        size = _wire_bytes(kind, [*args, outputs], group.size())
        label = (
            None
            if kind in _POINT_TO_POINT
            else f"{group.group_desc or group.group_name}, {group.size():,} ranks"
        )
        self._clock.run_host(priors.PYTHON_OPERATION_NS)
        work = KernelWork(
            kind,
            "communication",
            WorkClass.COLLECTIVE,
            0,
            size,
            group=label,
            share_of_box=_share_of_box(kind, group),
        )
        return self._clock.run_collective(work, is_async)

    def _wait_for(self, done: Times | None) -> None:
        if done is not None:
            self._clock.wait(done)

    def _wait(self, work: Any) -> bool:
        done, references = self._works.get(work.seq_id, (None, []))
        if isinstance(done, _Receipt):
            tensors = [
                each for reference in references if (each := reference()) is not None
            ]
            done = self._receive(done, tensors)
            self._works[work.seq_id] = done, references
        self._wait_for(done)
        return True

    def _future_of(self, work: Any) -> Any:
        future: torch.futures.Future[Any] = torch.futures.Future()
        references = self._works.get(work.seq_id, (None, []))[1]
        future.set_result(
            [tensor for reference in references if (tensor := reference()) is not None]
        )
        return future


@cache
def _kind_of(name: str) -> str | None:
    plain = name.rpartition("::")[2].replace("_", "")
    return next((kind for part, kind in _KINDS.items() if part in plain), None)


def _argument(func: Any, args: Any, kwargs: Any, name: str) -> Any:
    """Return an argument by its name; None where the operation has none of this
    name."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return (
                args[position]
                if position < len(args)
                else kwargs.get(name, argument.default_value)
            )
    return None


def _group(func: Any, args: Any, kwargs: Any) -> Any:
    boxed = _argument(func, args, kwargs, "process_group")
    if boxed is not None:
        return boxed if isinstance(boxed, ProcessGroup) else ProcessGroup.unbox(boxed)
    name = _argument(func, args, kwargs, "group_name")
    return name if isinstance(name, ProcessGroup) else _resolve_process_group(name)


def _share_of_box(kind: str, group: Any) -> float:
    """Return the share of the ranks of this one's box that send in a group of several
    boxes; 0 for one of a single box."""
    per_box = int(torch.cuda.device_count())
    ranks = _world.pg_group_ranks.get(group, range(group.size()))
    own = sum(rank < per_box for rank in ranks)
    if own == len(ranks):
        return 0.0
    return (1 if kind in _POINT_TO_POINT else own) / per_box


def _wire_bytes(kind: str, parts: list[Any], ranks: int) -> int:
    """Return the bytes that a rank sends or receives.

    By the ring algorithms of NCCL, whose broadcast and reduce pass every byte once (bus
    bandwidth in
    https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md)."""
    if ranks == 1 and kind not in _POINT_TO_POINT:
        return 0
    largest = max(_bytes_of(part) for part in parts)
    share = _RING_SHARES.get(kind)
    return largest if share is None else round(share(ranks) * largest)


def _listed(value: Any) -> tuple[Any, Any] | None:
    """Return the values of a tensor, and their type, as a message takes them."""
    return None if value is None else (value.tolist(), value.dtype)


def _bytes_of(value: Any) -> int:
    if isinstance(value, list | tuple | torch.Tensor):
        return sum(
            tensor.numel() * tensor.element_size() for tensor in tensors_in((value,))
        )
    return 0
