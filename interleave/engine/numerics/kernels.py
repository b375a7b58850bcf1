"""The update on the CPU: one pass over memory, on slices, in a pool of threads.

Serial loops without the GIL run it.
"""

import itertools
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import torch

from ebbtide import host_limits
from ebbtide.interleave.engine.forks import WorkQueue
from ebbtide.interleave.engine.numerics import host_arrays
from ebbtide.interleave.engine.numerics.fingerprint import BLOCK as FINGERPRINT_BLOCK
from ebbtide.interleave.engine.numerics.fingerprint import KEYS, Words, memory_words
from ebbtide.interleave.engine.numerics.norm import BLOCK as SUM_BLOCK
from ebbtide.interleave.engine.numerics.norm import total
from ebbtide.interleave.engine.numerics.whole_update import update_whole
from ebbtide.interleave.engine.rules.adamw import ADAMW
from ebbtide.interleave.engine.rules.rule import (
    BLOCK,
    Scalars,
    UpdateRange,
    UpdateRule,
    WholeUpdate,
)
from ebbtide.numa.binding import bind_thread, cpus_within
from ebbtide.state_bytes import GRAD_BYTES, PARAM_BYTES, STATE_BYTES

# Memory traffic per parameter if gradient and parameter have half precision: read
# gradient 2 and state 12, write state 12 and parameter 2. It limits the speed.
ONE_PASS_BYTES = GRAD_BYTES + 2 * STATE_BYTES + PARAM_BYTES

# Slices are multiples of this: two cache lines of bfloat16 elements. If a tensor starts
# at a cache line, no two threads write to the same line.
_ALIGNMENT = 64
# Maximum elements of a slice: about 10 ms. A thread that shares its core gets fewer
# slices, and threads rarely wait for the GIL.
_MAX_SLICE = 8 << 20
# Minimum elements of a slice: for smaller ones, passing it to a thread costs more than
# it saves.
_MIN_SLICE = 16 << 10

# Added to the nice value of the threads. Where cores are short they have a third of the
# weight of other threads, so they are soon preempted and never starve.
_NICENESS = 5

_Ranges = Iterable[UpdateRange | tuple[int, int, Scalars]]


class CpuKernel:
    """The update of reference.py on the CPU, with the same bits.

    Loops compile on their first call for each combination of types (about a second;
    once per machine if numba can cache them on disk). The calling thread waits without
    the GIL. Calls from several threads share one pool, by default of
    `host_limits.rank_cores` threads. OMP_NUM_THREADS is ignored, because torchrun sets
    it to 1. Tensors of another kind than described raise ValueError."""

    def __init__(self, threads: int | None = None) -> None:
        # numba takes long to import, and code that only describes updates does not need
        # it.
        from ebbtide.interleave.engine.numerics import compiled, compiled_beside

        self._compiled, self._beside = compiled, compiled_beside
        self._wanted_threads = threads
        self._start(None)

    def bind(self, node: int | None) -> None:
        """Run the threads on the cores of a NUMA node.

        By default there are then no more threads than cores.

        Nothing may run at the same time. Without a node, or a core on it: all cores
        that this process may use."""
        self.close()
        self._start(node)

    def _start(self, node: int | None) -> None:
        self.threads = self._wanted_threads or _default_threads(node)
        self._pool = WorkQueue("ebbtide-cpu", self.threads, _prepare_thread, node)
        # It starts with the first whole parameter. What it computes between products
        # needs its flags, too.
        self._whole_thread = WorkQueue("ebbtide-whole", 1, _prepare_thread, node)

    def update(
        self,
        grad: torch.Tensor,
        state: Sequence[torch.Tensor],
        out: torch.Tensor | None,
        scalars: Scalars,
        share: float = 1.0,
        rule: UpdateRule = ADAMW,
        position: int = 0,
        shape: tuple[int, int] | None = None,
    ) -> None:
        """Update the state in place and write the parameter, as `reference.update`.

        Return when all is done.

        All are contiguous CPU tensors with one dimension and the same length. The
        threads that are not in the share leave the host's memory to copies."""
        self.update_ranges(
            grad,
            state,
            out,
            [UpdateRange(0, len(grad), scalars, position, shape)],
            share,
            rule,
        )

    def update_ranges(
        self,
        grad: torch.Tensor,
        state: Sequence[torch.Tensor],
        out: torch.Tensor | None,
        ranges: _Ranges,
        share: float = 1.0,
        rule: UpdateRule = ADAMW,
    ) -> None:
        """Run `update` on ranges of elements, which do not overlap.

        Thousands of small ranges take no longer than a few large ones."""
        host_arrays.check_update("cpu", grad, state, rule, out)
        updates = [UpdateRange(*each) for each in ranges]
        if any(of.shape is not None for of in updates):
            for of in updates:
                self._update_whole(grad, state, out, of, share, rule)
            return
        gradient, rows = (
            host_arrays.as_array(grad),
            [host_arrays.as_array(row) for row in state],
        )
        parameter = None if out is None else host_arrays.as_array(out)
        loops = self._compiled.loops_of(rule)
        scaled_update = (
            None
            if rule.scaled is None
            else import_module(rule.scaled.loops).update_of(rule)
        )

        def part(begin: int, end: int, of: UpdateRange) -> None:
            stored, scalars = gradient[begin:end], of.scalars
            if scaled_update is not None:
                own = rule.row_slices(
                    begin, end, of.block + (begin - of.begin) // BLOCK
                )
                master, *others = [
                    row[part] for row, part in zip(rows, own, strict=True)
                ]
                codes, scales = (
                    tuple(others[: len(rule.moments)]),
                    tuple(others[len(rule.moments) :]),
                )
                half = () if parameter is None else (parameter[begin:end],)
                scaled_update(stored, master, codes, scales, half, scalars)
                return
            parts, position = (
                tuple([row[begin:end] for row in rows]),
                of.position + begin - of.begin,
            )
            if parameter is None:
                loops.update_state(stored, parts[0], parts[1:], scalars, position)
            elif rule.split is not None:
                loops.update_split(
                    stored, parts[0], parts[1:], parameter[begin:end], scalars, position
                )
            else:
                loops.update(stored, parts, parameter[begin:end], scalars, position)

        jobs = [(of.begin, of.end, of) for of in updates]
        self._run(
            part,
            jobs,
            BLOCK if rule.scales else _ALIGNMENT,
            max(1, round(share * self.threads)),
        )

    def _update_whole(
        self,
        grad: torch.Tensor,
        state: Sequence[torch.Tensor],
        out: torch.Tensor | None,
        of: UpdateRange,
        share: float,
        rule: UpdateRule,
    ) -> None:
        assert of.shape is not None
        own, parameter = (
            slice(of.begin, of.end),
            None if out is None else out[of.begin : of.end],
        )

        def update(
            grad: Any, state: Any, out: Any, scalars: Scalars, own: UpdateRule
        ) -> None:
            self.update(grad, state, out, scalars, share, own)

        assert rule.whole_update is not None
        rows, transform = (
            [row[own] for row in state],
            partial(self.transform, rule.whole_update, share=share),
        )
        update_whole(
            grad[own], rows, parameter, of.scalars, rule, of.shape, update, transform
        )

    def transform(
        self,
        whole: WholeUpdate,
        values: torch.Tensor,
        shape: tuple[int, int],
        parts: Any,
        share: float = 1,
    ) -> None:
        """Run the transform of an update of whole parameters."""
        multiply = partial(self._multiply, import_module(whole.loops), share)
        self._whole_thread.submit(
            whole.transform, values, shape, parts, multiply, self.sum_of_squares
        ).result()

    def _multiply(self, loops: Any, share: float, a: Any, b: Any) -> Any:
        product = np.empty((len(a), b.shape[1]), np.float32)

        def part(begin: int, end: int, _: None) -> None:
            loops.multiply(a[begin:end], b, product[begin:end])

        self._run(
            part,
            [(0, len(a), None)],
            loops.ROWS,
            max(1, round(share * self.threads)),
            1,
        )
        return product

    def update_beside(
        self,
        grad: torch.Tensor,
        state: Iterable[torch.Tensor],
        new_state: Iterable[torch.Tensor],
        out: torch.Tensor | None,
        ranges: _Ranges,
        share: float = 1.0,
        rule: UpdateRule = ADAMW,
    ) -> None:
        """Run `update_ranges` out of place.

        Read the old state, and write the new one to other memory.

        A state is master and moments: a (rows, n) tensor, or tensors as for `update`.
        The old one stays as it is. Elements in no range have the same values in both,
        and are not written to `out`, which has the parameters if the rule reads
        them."""
        old, new = tuple(state), tuple(new_state)
        for rows in (old, new):
            host_arrays.check_update("cpu", grad, rows, rule, out)
        host_arrays.check_disjoint(old, new, len(rule.row_names))
        if rule.whole_update is not None or rule.scales or rule.split is not None:
            for source, target in zip(old, new, strict=True):
                target.copy_(source)
            self.update_ranges(grad, new, out, ranges, share, rule)
            return
        gradient, parameter = (
            host_arrays.as_array(grad),
            None if out is None else host_arrays.as_array(out),
        )
        old_rows, new_rows = (
            [host_arrays.as_array(row) for row in rows] for rows in (old, new)
        )
        update = self._beside.update_of(rule)

        def part(begin: int, end: int, of: UpdateRange | None) -> None:
            sources, targets = (
                tuple([row[begin:end] for row in rows]) for rows in (old_rows, new_rows)
            )
            if of is None:
                for source, target in zip(sources, targets, strict=True):
                    self._beside.copy(source, target)
            else:
                half = None if parameter is None else parameter[begin:end]
                update(
                    gradient[begin:end],
                    sources,
                    targets,
                    half,
                    of.scalars,
                    of.position + begin - of.begin,
                )

        self._run(
            part,
            _with_gaps(ranges, grad.numel()),
            _ALIGNMENT,
            max(1, round(share * self.threads)),
        )

    def sum_of_squares(self, gradient: torch.Tensor) -> float:
        """Return `norm.sum_of_squares` of a gradient, with the same bits.

        The gradient is contiguous and has one dimension.

        It is finite exactly if all elements are."""
        return self.sums_of_squares([gradient])[0]

    def sums_of_squares(self, gradients: Sequence[torch.Tensor]) -> list[float]:
        """Return `sum_of_squares` of each gradient. Thousands of small ones take no
        longer than a few large ones."""
        host_arrays.check_each("cpu", gradients)
        blocks = [-(-gradient.numel() // SUM_BLOCK) for gradient in gradients]
        sums = np.empty(sum(blocks))
        jobs = []
        first = 0
        for values, count in zip(host_arrays.as_arrays(gradients), blocks, strict=True):
            jobs.append((0, len(values), (values, sums[first : first + count])))
            first += count

        def part(begin: int, end: int, arrays: tuple[Any, Any]) -> None:
            values, block_sums = arrays
            self._compiled.block_sums(
                values[begin:end], block_sums[begin // SUM_BLOCK : -(-end // SUM_BLOCK)]
            )

        self._run(part, jobs, SUM_BLOCK, self.threads)
        remaining = iter(sums.tolist())
        return [total(itertools.islice(remaining, count)) for count in blocks]

    def warm_up(
        self,
        dtypes: Collection[tuple[torch.dtype, torch.dtype]],
        out_of_place: bool = False,
        rule: UpdateRule = ADAMW,
    ) -> None:
        """Compile the loops for these dtypes of gradient and parameter, and run them on
        one element."""
        scalars, shape = (
            rule.scalars(rule.defaults, 1),
            (1, 1) if rule.whole_update is not None else None,
        )
        for grad_dtype, dtype in dtypes:
            grad, out = (
                torch.zeros(1, dtype=kind, device="cpu") for kind in (grad_dtype, dtype)
            )
            state, written, own = rule.inputs(rule.zero_rows(1), out)
            new = rule.inputs(rule.zero_rows(1), out.clone()).state
            # Where a cast follows, the update writes no parameters.
            for target in (written,) if rule.reads_params else (written, None):
                self.update(grad, state, target, scalars, rule=own, shape=shape)
                if out_of_place:
                    self.update_beside(
                        grad,
                        state,
                        new,
                        target,
                        [UpdateRange(0, 1, scalars, 0, shape)],
                        rule=own,
                    )
            self.sum_of_squares(grad)
            self.fingerprint(out)

    def fingerprint(self, values: torch.Tensor) -> bytes:
        """Return `fingerprint.fingerprint` of a contiguous one-dimensional tensor."""
        return self.fingerprints([values])[0]

    def fingerprints(self, values: Sequence[torch.Tensor]) -> list[bytes]:
        """Return `fingerprint` of each tensor.

        The calling thread computes it where they are small.
        """
        host_arrays.check_each("cpu", values)
        arrays = list(map(memory_words, host_arrays.as_arrays(values)))
        sums = [
            np.empty((-(-words.size // FINGERPRINT_BLOCK), len(KEYS)), np.uint64)
            for words in arrays
        ]
        if sum(words.size for words in arrays) < _MIN_SLICE * len(arrays):
            for words, own_sums in zip(arrays, sums, strict=True):
                self._compiled.fingerprint(words, KEYS, own_sums)
        else:
            jobs = [
                (0, words.size, (words, own_sums))
                for words, own_sums in zip(arrays, sums, strict=True)
            ]
            self._run(self._fingerprint_part, jobs, FINGERPRINT_BLOCK, self.threads)
        return [own_sums.tobytes() for own_sums in sums]

    def _fingerprint_part(
        self, begin: int, end: int, arrays: tuple[Words, Any]
    ) -> None:
        words, sums = arrays
        blocks = slice(begin // FINGERPRINT_BLOCK, -(-end // FINGERPRINT_BLOCK))
        self._compiled.fingerprint(words[begin:end], KEYS, sums[blocks])

    def close(self) -> None:
        self._whole_thread.close()
        self._pool.close()

    def _run(
        self,
        part: Callable[[int, int, Any], None],
        ranges: Iterable[tuple[int, int, Any]],
        unit: int,
        threads: int,
        min_slice: int = _MIN_SLICE,
    ) -> None:
        """Call part(begin, end, argument) for slices of (begin, end, argument).

        The slices are of whole units where there are several.

        Only threads of the pool call it, because their flags are set. Each takes one
        slice after the other."""
        ranges = list(ranges)
        length = sum(end - begin for begin, end, _ in ranges)
        size = min(max(length // self.threads, min_slice), _MAX_SLICE)
        size = -(-size // unit) * unit
        remaining = (
            (begin, min(begin + size, last), argument)
            for first, last, argument in ranges
            for begin in range(first, last, size)
        )
        # A generator runs on one thread at a time.
        lock = threading.Lock()

        def run_slices() -> None:
            while True:
                with lock:
                    item = next(remaining, None)
                if item is None:
                    return
                part(*item)

        # Small tensors are not worth more threads.
        count = min(threads, max(1, -(-length // min_slice)))
        running = [self._pool.submit(run_slices) for _ in range(count)]
        # Also after an error nothing is written any more when this returns.
        errors = [error for each in running if (error := each.exception()) is not None]
        if errors:
            raise errors[0]


def _with_gaps(
    ranges: _Ranges, length: int
) -> Iterator[tuple[int, int, UpdateRange | None]]:
    """Yield the ranges in order, and with None the gaps between them.

    Gaps are the other elements of a tensor of this length.
    """
    end = 0
    for first, last, *others in sorted(ranges, key=lambda each: each[:2]):
        if first > end:
            yield end, first, None
        yield first, last, UpdateRange(first, last, *others)
        end = last
    if length > end:
        yield end, length, None


def _default_threads(node: int | None) -> int:
    share = host_limits.rank_cores()
    on_node = len(cpus_within(node)) if node is not None else 0
    return min(share, on_node or share)


def _prepare_thread(node: int | None) -> None:
    # A new thread inherits the flags of the thread that starts it, and some libraries
    # set a flag that flushes subnormals.
    torch.set_flush_denormal(False)
    bind_thread(node)
    # Of this thread alone, on Linux: the training thread, a data loader and NCCL share
    # the cores with updates.
    os.nice(_NICENESS)
