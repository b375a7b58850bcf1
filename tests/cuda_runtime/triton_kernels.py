"""ebbtide's Triton kernels on the stand-in: Triton compiles and launches them, the
CPU's kernels run in their place.

A launch has what Triton's launcher gives to the driver, and what is compiled into the
kernel. Kernels read their tables from memory, later, on their stream.
"""

import ctypes
import sys
import traceback
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from ebbtide.interleave.engine.numerics.fingerprint import BLOCK as FINGERPRINT_BLOCK
from ebbtide.interleave.engine.numerics.fingerprint import KEYS
from ebbtide.interleave.engine.numerics.kernels import CpuKernel
from ebbtide.interleave.engine.numerics.norm import BLOCK as SUMS_BLOCK
from ebbtide.interleave.engine.rules.rule import UpdateRule
from tests.cuda_runtime import runtime
from tests.cuda_runtime.kernels import host_bytes
from tests.cuda_runtime.runtime import Bytes
from tests.cuda_runtime.triton_launches import DriverLaunch, Words, listen

# By the names of Triton's types.
_TYPES = {"uint16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_UNKNOWN_ERROR = 999


# Called by the driver.
_callback: Any = None


def install() -> None:
    """Let launches of the engine's kernels run on the stand-in, where Triton is
    installed."""
    global _callback
    from ebbtide.interleave.engine.numerics import triton_compiled

    kernels = _Kernels(triton_compiled.formula_of)
    triton_compiled.formula_of = kernels.formula_of
    _callback = listen(ctypes.CDLL("libcuda.so.1"), kernels.on_launch)


def _words(address: int, count: int) -> Words:
    return np.ctypeslib.as_array(
        (ctypes.c_int64 * count).from_address(runtime.alias(address))
    )


class _Span(NamedTuple):
    """Elements in memory."""

    address: int
    count: int
    dtype: torch.dtype

    def tensor(self) -> torch.Tensor:
        if not self.count:
            return torch.empty(0, dtype=self.dtype)
        return host_bytes(self.address, self.count * self.dtype.itemsize).view(
            self.dtype
        )

    def bytes(self) -> Bytes:
        return Bytes(self.address, self.count * self.dtype.itemsize)


@dataclass(frozen=True)
class _TensorUpdate:
    """The update of one tensor, by a row of the table."""

    grad: _Span
    out: _Span
    state: tuple[_Span, ...]
    scalars: tuple[np.float32, ...]
    position: int


class _Kernels:
    """The kernels, with one CPU kernel for all.

    Args:
        compile_formula: Returns the formula of a rule, compiled.
    """

    def __init__(self, compile_formula: Any) -> None:
        self._kernel = CpuKernel(1)
        self._compile_formula = compile_formula
        # By the identities of compiled formulas, which live as long as the process.
        self._rules: dict[int, UpdateRule] = {}
        # The words of tables on devices, by address: when a kernel is launched, its
        # table may be on the way.
        self._tables: dict[int, Words] = {}

    def formula_of(self, rule: UpdateRule) -> Any:
        """Return the formula of a rule, compiled."""
        formula = self._compile_formula(rule)
        self._rules[id(formula)] = rule
        return formula

    def on_launch(self, launch: DriverLaunch) -> int:
        """Issue the kernel of a launch; return a CUresult."""
        try:
            return int(getattr(self, f"_{launch.kernel}")(launch))
        except BaseException:
            runtime.errors.append(launch.kernel)
            sys.stderr.write(
                f"cuda_runtime: {launch.kernel} failed at its "
                f"launch\n{traceback.format_exc()}"
            )
            return _UNKNOWN_ERROR

    def _load_table(self, launch: DriverLaunch) -> int:
        source, target, length = (
            launch.arguments[name] for name in ("host_table", "table", "length")
        )
        self._tables[target] = _words(source, length).copy()

        def load() -> None:
            _words(target, length)[:] = _words(source, length)

        reads, writes = Bytes(source, 8 * length), Bytes(target, 8 * length)
        return runtime.issue(launch.stream, launch.kernel, load, [reads], [writes])

    def _update(self, launch: DriverLaunch) -> int:
        rule = self._rules[id(launch.constants["formula"])]

        def compute() -> None:
            for one in _updates_of(launch, rule, self._memory_of(launch)):
                state = [span.tensor() for span in one.state]
                grad = one.grad.tensor()
                out = (
                    None
                    if one.out.address == one.state[0].address
                    else one.out.tensor()
                )
                self._kernel.update(
                    grad, state, out, one.scalars, rule=rule, position=one.position
                )

        updates = _updates_of(launch, rule, self._table_of(launch))
        reads = [one.grad.bytes() for one in updates]
        writes = [span.bytes() for one in updates for span in (one.out, *one.state)]
        return self._issue(launch, compute, reads, writes)

    def _block_sums(self, launch: DriverLaunch) -> int:
        dtype, sums = _TYPES[str(launch.constants["dtype"])], launch.arguments["sums"]

        def spans(words: Words) -> list[tuple[_Span, _Span]]:
            return [
                (
                    _Span(address, length, dtype),
                    _Span(sums + 8 * first, -(-length // SUMS_BLOCK), torch.float64),
                )
                for address, length, first in launch.rows(words)[1].tolist()
            ]

        def compute() -> None:
            for values, results in spans(self._memory_of(launch)):
                blocks = values.tensor().split(SUMS_BLOCK)[: results.count]
                sums_of_blocks = [
                    self._kernel.sum_of_squares(block.clone()) for block in blocks
                ]
                results.tensor()[:] = torch.tensor(sums_of_blocks, dtype=results.dtype)

        return self._issue_reduction(launch, compute, spans(self._table_of(launch)))

    def _block_fingerprints(self, launch: DriverLaunch) -> int:
        target, width = launch.arguments["fingerprints"], len(KEYS)

        def spans(words: Words) -> list[tuple[_Span, _Span]]:
            return [
                (
                    _Span(address, length, torch.bfloat16),
                    _Span(
                        target + 8 * width * first,
                        width * -(-length // (4 * FINGERPRINT_BLOCK)),
                        torch.int64,
                    ),
                )
                for address, length, first in launch.rows(words)[1].tolist()
            ]

        def compute() -> None:
            for values, results in spans(self._memory_of(launch)):
                fingerprint = self._kernel.fingerprint(values.tensor())
                results.tensor().numpy()[:] = np.frombuffer(fingerprint, np.int64)

        return self._issue_reduction(launch, compute, spans(self._table_of(launch)))

    def _issue_reduction(
        self, launch: DriverLaunch, work: Any, spans: list[tuple[_Span, _Span]]
    ) -> int:
        reads, writes = zip(*spans, strict=True)
        return self._issue(
            launch,
            work,
            [span.bytes() for span in reads],
            [span.bytes() for span in writes],
        )

    def _issue(
        self, launch: DriverLaunch, work: Any, reads: list[Bytes], writes: list[Bytes]
    ) -> int:
        table = Bytes(launch.arguments["table"], launch.table_bytes)
        return runtime.issue(
            launch.stream, launch.kernel, work, [table, *reads], writes
        )

    def _memory_of(self, launch: DriverLaunch) -> Words:
        """Return the words of a launch's table that are in memory."""
        return _words(launch.arguments["table"], launch.table_bytes // 8)

    def _table_of(self, launch: DriverLaunch) -> Words:
        """Return the words that a launch's table will have when the kernel runs."""
        loaded = self._tables.get(launch.arguments["table"])
        return self._memory_of(launch) if loaded is None else loaded


def _updates_of(
    launch: DriverLaunch, rule: UpdateRule, words: Words
) -> list[_TensorUpdate]:
    """Return the rows of the table of an update."""
    grad_dtype, out_dtype = (
        _TYPES[str(launch.constants[name])] for name in ("grad_dtype", "out_dtype")
    )
    dtypes = rule.dtypes
    if rule.split is None:
        # A master may be a parameter.
        dtypes = (_TYPES[str(launch.constants["master_dtype"])], *dtypes[1:])
    moments, factors, first_other = (
        len(rule.moments),
        launch.constants["factors"],
        launch.first_other_column,
    )
    updates = []
    for row in launch.rows(words)[1]:
        length, grad, out = row[:3].tolist()
        # A position with rounded moments; with scaled ones the numbers of codes, and
        # the scales.
        others = row[first_other:].tolist()
        addresses = [*row[3 : 4 + moments].tolist(), *others[1:]]
        lengths = [part.stop for part in rule.row_slices(0, length, 0)]
        scalars = row[4 + moments : first_other].view(np.float32)[:factors]
        updates.append(
            _TensorUpdate(
                grad=_Span(grad, length, grad_dtype),
                out=_Span(out, length, out_dtype),
                state=tuple(map(_Span, addresses, lengths, dtypes)),
                scalars=tuple(scalars),
                position=others[0] if rule.rounds else 0,
            )
        )
    return updates
