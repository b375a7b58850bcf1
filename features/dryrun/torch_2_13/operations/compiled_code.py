"""The work of code that torch.compile compiles: chains of element-wise operations and
reductions are one kernel, which moves no tensor that only they use."""

import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from ebbtide.features.dryrun.sink import Charge
from ebbtide.features.dryrun.torch_2_13.operations.kernel_work import (
    tensor_bytes,
    written_tensors,
)
from ebbtide.machines.kernels.rates import KernelWork
from ebbtide.machines.kernels.time_priors import WorkClass

_FUSED = frozenset({WorkClass.ELEMENTWISE, WorkClass.REDUCTION, WorkClass.FOREACH})
# Results of these stay in registers in compiled code without gradients.
_IN_REGISTERS = _FUSED | {WorkClass.INDEXED}
# Kernels that stay whole, and gathers that are fused, by parts of their names.
_WHOLE, _FUSED_GATHERS = ("_fused_", "_amp_"), ("nll_loss",)
# Reads at positions, which other operations are fused with.
_FUSED_READS = frozenset({"index", "gather"})
# Of these a second kernel reads the tensor when its statistics are there.
_TWO_PASSES = ("batch_norm", "group_norm")
# Backends of torch.compile that fuse nothing, and modes with CUDA graphs.
_EAGER = frozenset({"eager", "aot_eager"})
_GRAPHED = frozenset({"reduce-overhead", "max-autotune"})


class _Unwritten(NamedTuple):
    """A tensor that a fused kernel made and has not written: a reference to its
    storage, the kernel, and bytes in memory of what it is made of, by storage."""

    storage: Any
    kernel: int
    sources: dict[int, int]


@dataclass(frozen=True)
class _Call:
    """The last call of compiled code on a thread: the numbers of autograd's nodes from
    its begin to its end."""

    begin: int
    end: int
    is_graphed: bool


class CompiledCode:
    """Follows calls of compiled code, and charges its operations.

    Where an operation needs a tensor that was not written, the kernel that made it
    writes it, or makes it again from its sources if these have fewer bytes
    (torch/_functorch/partitioners.py does so for the backward).
    """

    def __init__(self, allocate: Callable[[Any, int], None]) -> None:
        """`allocate`: gives a storage memory on a device."""
        self._allocate = allocate
        # Storages without memory yet, and their devices.
        self._in_registers: dict[int, tuple[Any, int]] = {}
        self._calls: list[_Call] = []
        self._running: list[bool] = []  # Of the calls that run: with CUDA graphs.
        self._unwritten: dict[int, _Unwritten] = {}
        self._kernel = 0
        self._is_launched = False
        # Bytes of each storage that the kernel at work has read, and those it wrote.
        self._read: Counter[int] = Counter()
        self._written: set[int] = set()

    @contextmanager
    def call(self, options: dict[str, Any]) -> Iterator[None]:
        """Run a call of what torch.compile returned with some options."""
        if options.get("backend") in _EAGER:
            yield
            return
        is_graphed = options.get("mode") in _GRAPHED
        begin = torch._C._autograd._get_sequence_nr()
        self._running.append(is_graphed)
        try:
            yield
        finally:
            self._running.pop()
            if not self._running:
                self._leave_registers()
            end = torch._C._autograd._get_sequence_nr()
            if not self._running and end > begin:
                self._calls.append(_Call(begin, end, is_graphed))

    def keeps_in_registers(self, charge: Charge, inputs: list[Any]) -> bool:
        """Return whether results of an operation need no memory: nothing but fused
        kernels may read them, and no backward does. Otherwise give memory to what the
        operation reads."""
        if not self._running or torch.is_grad_enabled():
            return False
        if charge.work is None or charge.work.work_class in _IN_REGISTERS:
            return True
        for tensor in inputs:
            self._give_memory(tensor.untyped_storage()._cdata)
        return False

    def keep(self, tensor: Any) -> None:
        """Give a tensor memory when it is needed: where it leaves compiled code."""
        storage = tensor.untyped_storage()
        reference = weakref.ref(storage)
        self._in_registers[storage._cdata] = reference, tensor.fake_device.index

    def _leave_registers(self) -> None:
        for key in list(self._in_registers):
            self._give_memory(key)

    def _give_memory(self, key: int) -> None:
        reference, device = self._in_registers.pop(key, (lambda: None, 0))
        if (storage := reference()) is not None:
            self._allocate(storage, device)

    def charge(
        self,
        charge: Charge,
        func: Any,
        args: Any,
        kwargs: Any,
        inputs: list[Any],
        outputs: list[Any],
    ) -> Charge:
        """Return what an operation costs where it runs: in compiled code or beside
        it."""
        is_graphed = self._state()
        work = charge.work
        if is_graphed is None:
            if work is None or not self._unwritten:
                return charge
            return charge._replace(work=self._after_fused(work, inputs, outputs))
        if work is None:
            return charge._replace(is_free=True)
        if not _is_fused(work):
            work = self._after_fused(work, inputs, outputs)
        else:
            work = self._in_kernel(work, func, args, kwargs, inputs, outputs)
        is_free = is_graphed or work is None or not work.launches
        return charge._replace(work=work, list_tensors=0, is_free=is_free)

    def _state(self) -> bool | None:
        """Return whether the running operation is in a CUDA graph; None: it is not in
        compiled code."""
        if self._running:
            return self._running[-1]
        if not self._calls or torch._C._current_graph_task_id() == -1:
            return None
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return None
        number = node._sequence_nr()
        index = bisect_right(self._calls, number, key=lambda call: call.begin) - 1
        call = self._calls[index]
        return call.is_graphed if index >= 0 and number < call.end else None

    def _after_fused(
        self, work: KernelWork, inputs: list[Any], outputs: list[Any]
    ) -> KernelWork:
        """Return the work of a kernel of its own, and of writing what it reads."""
        written = sum(map(self._write, inputs))
        self._kernel += 1
        self._is_launched = False
        self._read.clear()
        self._written.clear()
        for tensor in outputs:
            self._unwritten.pop(tensor.untyped_storage()._cdata, None)
        return replace(work, copied_bytes=work.copied_bytes + written)

    def _in_kernel(
        self,
        work: KernelWork,
        func: Any,
        args: Any,
        kwargs: Any,
        inputs: list[Any],
        outputs: list[Any],
    ) -> KernelWork | None:
        """Return what an operation adds to the kernel at work; None: nothing."""
        written = written_tensors(func, args, kwargs)
        sources: dict[int, int] = {}
        size = sum(self._read_by_kernel(tensor, sources) for tensor in inputs)
        if any(part in work.name for part in _TWO_PASSES):
            size += max(map(tensor_bytes, inputs), default=0)
        for tensor in written or outputs:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self._unwritten or not written:
                reference = weakref.ref(storage)
                self._unwritten[key] = _Unwritten(reference, self._kernel, sources)
            elif key not in self._written:
                self._written.add(key)
                size += tensor_bytes(tensor)
        launches = 0 if self._is_launched else work.launches
        self._is_launched = True
        if not size and not launches:
            return None
        return replace(work, bytes=size, launches=launches)

    def _read_by_kernel(self, tensor: Any, sources: dict[int, int]) -> int:
        """Return the bytes that the kernel at work reads for a tensor, and add what the
        tensor is made of to `sources`."""
        storage, size = tensor.untyped_storage(), tensor_bytes(tensor)
        made = self._made(storage)
        if made is not None and made.kernel == self._kernel:
            sources |= made.sources
            return 0
        if made is not None:
            missing = Counter(made.sources) - self._read
            if missing.total() < 2 * size:
                self._read |= missing
                sources |= made.sources
                return missing.total()
        written, before = self._write(tensor), self._read[storage._cdata]
        now = min(before + size, int(storage.nbytes()))
        self._read[storage._cdata] = sources[storage._cdata] = now
        return written + now - before

    def _write(self, tensor: Any) -> int:
        """Return the bytes to write a tensor, if it is not yet written."""
        storage = tensor.untyped_storage()
        if self._made(storage) is None:
            return 0
        del self._unwritten[storage._cdata]
        return tensor_bytes(tensor)

    def _made(self, storage: Any) -> _Unwritten | None:
        made = self._unwritten.get(storage._cdata)
        # Another storage may have its address.
        return made if made is not None and made.storage() is storage else None


def _is_fused(work: KernelWork) -> bool:
    name = work.name.rpartition("::")[2]
    if name in _FUSED_READS or any(part in name for part in _FUSED_GATHERS):
        return True
    return work.work_class in _FUSED and not name.startswith(_WHOLE)
