"""The update on a GPU by Triton, with the bits of the reference.

Also sums of squares, and fingerprints. The reference is in reference.py.

Each function takes any number of tensors and launches one kernel for each combination
of dtypes, and one that loads the table of the tensors. Quotient and root are rounded to
nearest, and multiply-adds are not fused (`enable_fp_fusion=False`). Importing this
module needs triton, which comes with CUDA builds of torch.
"""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from ebbtide.interleave.engine.numerics import triton_compiled as compiled
from ebbtide.interleave.engine.numerics.fingerprint import BLOCK as FINGERPRINT_BLOCK
from ebbtide.interleave.engine.numerics.fingerprint import KEYS
from ebbtide.interleave.engine.numerics.host_arrays import check_tensors, check_update
from ebbtide.interleave.engine.numerics.norm import BLOCK, total
from ebbtide.interleave.engine.numerics.reference import TensorUpdate
from ebbtide.interleave.engine.rules.adamw import ADAMW
from ebbtide.interleave.engine.rules.rule import UpdateRule


class SharedHostMemory:
    """Allocates host memory for launches, and keeps it until they are done; pinned if a
    GPU uses it.

    If not, launches are done when their call returns."""

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._in_flight: deque[tuple[torch.cuda.Event, tuple[torch.Tensor, ...]]] = (
            deque()
        )
        self._lock = threading.Lock()

    def allocate(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat tensor with any values. It is freed like any other tensor, so
        launches must `keep` it."""
        return torch.empty(count, dtype=dtype, device="cpu", pin_memory=self._pinned)

    def keep(self, *memory: torch.Tensor) -> Callable[[], None]:
        """Keep memory until the work on the current stream so far is done.

        Return a function that waits for that.
        """
        if not self._pinned or not memory:
            return lambda: None
        done = torch.cuda.Event(blocking=True)
        done.record()
        with self._lock:
            self._in_flight.append((done, memory))
            while self._in_flight and self._in_flight[0][0].query():
                self._in_flight.popleft()
        return lambda: None if done.query() else done.synchronize()


def table_words(
    programs: Sequence[int], rows: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Return the words of a table, from the number of programs for each tensor and rows
    of shape (tensors, columns)."""
    first_programs = list(itertools.accumulate(programs, initial=0))[:-1]
    return np.concatenate([np.array(first_programs, np.int64), rows.reshape(-1)])


def scalar_columns(scalars: Sequence[Sequence[np.float32]]) -> npt.NDArray[np.int64]:
    """Return the fp32 scalars of each tensor as columns.

    There are two in each word, of shape (tensors, columns).
    """
    values = np.array(scalars, np.float32)
    return np.pad(values, ((0, 0), (0, values.shape[1] % 2))).view(np.int64)


# Triton's interpreter runs on the CPU.
_DEVICE = "cpu" if triton.knobs.runtime.interpret else "cuda"
_HOST_MEMORY = SharedHostMemory(pinned=_DEVICE == "cuda")
# The types by which the kernels recognize what memory contains.
_BITS = {
    torch.bfloat16: tl.uint16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
}
# One warp sums the 256 lanes of a block, eight on each thread, without waiting for
# others.
_SUMS_WARPS = 1
_FINGERPRINT_WARPS = 4
# Lengths for fingerprints are in units of this size, and a block has this many units.
_UNIT_BYTES = 2
_FINGERPRINT_UNITS = FINGERPRINT_BLOCK * 8 // _UNIT_BYTES
# Elements of the tensors that a warm-up runs on.
_WARM_UP_PARAMS = 64


def gpu_update(updates: Sequence[TensorUpdate]) -> None:
    """Run updates on one GPU, on its current stream; return before it is done.

    There is one launch for each rule and combination of dtypes of gradient, parameter
    and master. Raises ValueError, before any launch, if `CpuKernel.update` does not
    support the tensors, or they are not on one GPU."""
    groups: dict[tuple[UpdateRule, Any, Any, Any], list[TensorUpdate]] = defaultdict(
        list
    )
    for item in updates:
        check_update(_DEVICE, item.grad, item.state, item.rule, item.written)
        if item.out.numel():
            master = (
                tl.uint16 if item.rule.split is not None else _BITS[item.state[0].dtype]
            )
            groups[
                item.rule, _BITS[item.grad.dtype], _BITS[item.out.dtype], master
            ].append(item)
    with _on_device_of([item.out for item in updates]):
        loaded = [(key, group, *_load_updates(group)) for key, group in groups.items()]
        for (rule, grad, out, master), group, programs, table in loaded:
            join, split = _parts_of(rule)
            constants = {
                "grad_dtype": grad,
                "out_dtype": out,
                "master_dtype": master,
                "join": join,
                "split": split,
                "formula": compiled.formula_of(rule),
                "moments": len(rule.moments),
                "factors": len(group[0].scalars),
                "rounds": rule.rounds,
                "scaled": bool(rule.scales),
            }
            _launch(
                compiled.update,
                programs,
                table,
                len(group),
                **constants,
                num_warps=compiled.UPDATE_WARPS,
            )
        # Those that found no memory on the device.
        _HOST_MEMORY.keep(*(table for *_, table in loaded if not table.is_cuda))


def gpu_sums_of_squares(gradients: Sequence[torch.Tensor]) -> Callable[[], list[float]]:
    """Start `CpuKernel.sum_of_squares` of gradients on one GPU.

    Return a function that waits for the results.

    It runs on the current stream, with one launch for each dtype."""
    rows = _BlockRows(gradients, [gradient.numel() for gradient in gradients], BLOCK)
    sums = _HOST_MEMORY.allocate(rows.blocks, torch.float64)
    tables = []
    with _on_device_of(gradients):
        for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
            indices = [
                index
                for index, gradient in enumerate(gradients)
                if gradient.dtype == dtype
            ]
            options = {"dtype": _BITS[dtype], "num_warps": _SUMS_WARPS}
            tables.append(rows.launch(compiled.block_sums, indices, sums, **options))
        wait = _HOST_MEMORY.keep(sums, *tables)

    def results() -> list[float]:
        wait()
        return [total(values) for values in rows.split(sums.tolist())]

    return results


def gpu_fingerprint(values: Sequence[torch.Tensor]) -> Callable[[], list[bytes]]:
    """Start `CpuKernel.fingerprint` of tensors on one GPU.

    Return a function that waits for the results.

    It runs on the current stream, with one launch."""
    rows = _BlockRows(
        values, [value.nbytes // _UNIT_BYTES for value in values], _FINGERPRINT_UNITS
    )
    sums = _HOST_MEMORY.allocate(rows.blocks * len(KEYS), torch.int64)
    with _on_device_of(values):
        options = (
            {"keys": _keys(values[0].device), "num_warps": _FINGERPRINT_WARPS}
            if values
            else {}
        )
        table = rows.launch(
            compiled.block_fingerprints, range(len(values)), sums, **options
        )
        wait = _HOST_MEMORY.keep(sums, table)

    def results() -> list[bytes]:
        wait()
        blocks = sums.numpy().reshape(-1, len(KEYS))
        return [part.tobytes() for part in rows.split(blocks)]

    return results


def warm_up(
    device: torch.device,
    dtypes: Collection[tuple[torch.dtype, torch.dtype]],
    rule: UpdateRule = ADAMW,
) -> None:
    """Compile all kernels for these dtypes of gradient and parameter, load them on a
    GPU, and run them.

    They run on a few elements, and are done when this returns. No launch compiles
    anything after it.
    """
    updates = []
    for grad_dtype, out_dtype in dtypes:
        grad, out = (
            torch.zeros(_WARM_UP_PARAMS, dtype=dtype, device=device)
            for dtype in (grad_dtype, out_dtype)
        )
        state = [row.to(device) for row in rule.zero_rows(_WARM_UP_PARAMS)]
        scalars = rule.scalars(rule.defaults, 1)
        inputs = rule.inputs(state, out)
        updates.append(TensorUpdate(grad, inputs.state, out, scalars, inputs.rule))
    gpu_update(updates)
    gpu_sums_of_squares([item.grad for item in updates])()
    gpu_fingerprint([item.out for item in updates])()


@cache
def _parts_of(rule: UpdateRule) -> tuple[Any, Any]:
    """Return the functions of the kernel that join and split masters in two parts.

    Return None for a rule without such masters.
    """
    if rule.split is None:
        return None, None
    parts = import_module(rule.split.kernels)
    return parts.join, parts.split


class _BlockRows:
    """The rows of a kernel that computes one result for each block of tensors, and
    writes it to host memory.

    Lengths of tensors and of a block are in the unit of the kernel.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], lengths: Sequence[int], block: int
    ) -> None:
        for tensor in tensors:
            check_tensors(_DEVICE, (tensor,))
        self._counts = [triton.cdiv(length, block) for length in lengths]
        self._ends = list(itertools.accumulate(self._counts))
        self.blocks = sum(self._counts)
        first_blocks = [
            end - count for end, count in zip(self._ends, self._counts, strict=True)
        ]
        addresses = [tensor.data_ptr() for tensor in tensors]
        self._rows = np.column_stack([addresses, lengths, first_blocks]).astype(
            np.int64
        )

    def launch(
        self, kernel: Any, indices: Sequence[int], results: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        """Launch a kernel for the tensors of these indices, and return its table."""
        programs = [self._counts[index] for index in indices]
        table = _host_table(programs, self._rows[list(indices)])
        # A single row is read from the host, without a launch to load it: streamed
        # gradients would need a launch each.
        if sum(programs) and len(indices) > 1:
            table = _load_table(table)
        _launch(kernel, sum(programs), table, results, len(indices), **options)
        return table

    def split(self, results: Any) -> list[Any]:
        """Return the results of each tensor."""
        return [
            results[end - count : end]
            for count, end in zip(self._counts, self._ends, strict=True)
        ]


def _on_device_of(tensors: Sequence[torch.Tensor]) -> AbstractContextManager[object]:
    """Return a context in which the device of the tensors is the current one."""
    if len({tensor.device for tensor in tensors}) > 1:
        raise ValueError("all tensors of a launch must be on one device")
    return torch.cuda.device_of(tensors[0]) if tensors else nullcontext()


def _load_updates(updates: Sequence[TensorUpdate]) -> tuple[int, torch.Tensor]:
    """Return the number of programs and the table of an update.

    The table is in flight to the device.
    """
    rows = 1 + len(updates[0].rule.moments)
    addresses = [
        [tensor.data_ptr() for tensor in (item.grad, item.out, *item.state[:rows])]
        for item in updates
    ]
    lengths = [item.out.numel() for item in updates]
    scalars = scalar_columns([item.scalars for item in updates])
    programs = [triton.cdiv(length, compiled.UPDATE_BLOCK) for length in lengths]
    others = [_other_columns(item) for item in updates]
    table = _host_table(
        programs,
        np.column_stack([lengths, addresses, scalars, np.array(others, np.int64)]),
    )
    return sum(programs), _load_table(table)


def _other_columns(item: TensorUpdate) -> list[int]:
    if item.rule.scaled is None:
        return [item.position] if item.rule.rounds else []
    scales = item.state[1 + len(item.rule.moments) :]
    return [
        tensor.data_ptr()
        for tensor in (_data_type(item.rule, item.out.device), *scales)
    ]


@cache
def _data_type(rule: UpdateRule, device: torch.device) -> torch.Tensor:
    """Return the numbers and the middles between them of each moment, 256 each."""
    assert rule.scaled is not None
    infinite = np.full(1, np.inf, np.float32)
    pairs = zip(rule.scaled.values, rule.scaled.middles, strict=True)
    rows = [row for values, middles in pairs for row in (values, middles, infinite)]
    return torch.from_numpy(np.concatenate(rows)).to(device)


@cache
def _keys(device: torch.device) -> torch.Tensor:
    """Return the keys of fingerprints."""
    return torch.from_numpy(KEYS.view(np.int32)).to(device)


def _host_table(programs: Sequence[int], rows: npt.NDArray[np.int64]) -> torch.Tensor:
    words = table_words(programs, rows)
    table = _HOST_MEMORY.allocate(len(words), torch.int64)
    table.numpy()[:] = words
    return table


def _load_table(host_table: torch.Tensor) -> torch.Tensor:
    """Start to copy a table to the current device, and return the copy. Without memory
    kernels read the host's."""
    length = len(host_table)
    try:
        table = torch.empty(length, dtype=torch.int64, device=_DEVICE)
    except torch.OutOfMemoryError:
        return host_table
    _launch(
        compiled.load_table,
        triton.cdiv(length, compiled.TABLE_BLOCK),
        host_table,
        table,
        length,
    )
    _HOST_MEMORY.keep(host_table)
    return table


def _launch(kernel: Any, programs: int, *arguments: Any, **options: Any) -> None:
    """Launch a kernel on the current stream; nothing if there are no programs."""
    if programs:
        kernel[(programs,)](*arguments, enable_fp_fusion=False, **options)
