"""The kernel of the CPU, compared with the reference by bits."""

from __future__ import annotations

import os
import platform
import re
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numba import njit

from ebbtide import host_limits
from ebbtide.interleave.engine.numerics import compiled, compiled_beside, reference
from ebbtide.interleave.engine.numerics.joined_updates import joined_updates
from ebbtide.interleave.engine.numerics.kernels import CpuKernel
from ebbtide.interleave.engine.numerics.reference import TensorUpdate
from ebbtide.interleave.engine.rules.adamw import ADAMW, Hyper
from tests.conftest import run_process
from tests.interleave.engine.states import (
    DTYPES,
    any_state,
    arguments,
    assert_same,
    bits,
    plausible_state,
    updated,
)

HYPERS = st.sampled_from(
    [Hyper(), Hyper(1e-2, 0.3, 0.5, 0.0, 0.0), Hyper(0.0, 0.0, 0.0, 1e-3, 1.0)]
)
SCALES = st.sampled_from(
    [1.0, 0.3, 2.0**-16, 2.0**-140, 0.0, float("inf"), float("nan")]
)
SEEDS = st.integers(0, 2**31)
# More than 16,384 elements make several slices.
LENGTHS = st.integers(0, 200) | st.integers(16_000, 60_000)


@pytest.fixture(scope="module")
def kernels() -> Iterator[dict[int, CpuKernel]]:
    by_threads = {threads: CpuKernel(threads) for threads in (1, 2, 3, 5)}
    yield by_threads
    for kernel in by_threads.values():
        kernel.close()


# Each dtype of the gradient and of the parameter by default: the loops convert them
# independently.
@pytest.mark.parametrize(
    ("grad", "out"),
    [
        pytest.param(
            grad,
            out,
            marks=[] if (place + 1) % 3 == DTYPES.index(out) else pytest.mark.slow,
        )
        for place, grad in enumerate(DTYPES)
        for out in DTYPES
    ],
    ids=str,
)
@given(
    seed=SEEDS,
    length=LENGTHS,
    threads=st.sampled_from([1, 2, 3, 5]),
    hyper=HYPERS,
    step=st.integers(1, 10_000),
    scale=SCALES,
    plausible=st.booleans(),
)
def test_update__gives_the_bits_of_the_reference(
    kernels: dict[int, CpuKernel],
    grad: torch.dtype,
    out: torch.dtype,
    seed: int,
    length: int,
    threads: int,
    hyper: Hyper,
    step: int,
    scale: float,
    plausible: bool,
) -> None:
    state = (plausible_state if plausible else any_state)(length, grad, out, seed)
    scalars = hyper.scalars(step, scale)
    expected = updated(state, scalars)
    kernels[threads].update(*arguments(state), scalars)
    assert_same(state, expected)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
def test_update__gives_the_bits_of_the_reference_for_millions_of_elements(
    kernels: dict[int, CpuKernel], half: torch.dtype
) -> None:
    """Enough elements to show a fused multiply-add, whose result differs in some
    thousandths of all cases."""
    state = plausible_state(3_000_001, half, half, 0)
    for step in (1, 2):
        scalars = Hyper().scalars(step, 0.7)
        expected = updated(state, scalars)
        kernels[2].update(*arguments(state), scalars)
        assert_same(state, expected)


@pytest.mark.parametrize(
    ("dtype", "has_masters"),
    [(torch.float32, False), (torch.float32, True), (torch.bfloat16, True)],
)
def test_joined_updates__have_the_bits_of_each(
    kernels: dict[int, CpuKernel], dtype: torch.dtype, has_masters: bool
) -> None:
    """Small updates with equal factors are joined; the others stay as they are."""
    rule = ADAMW if has_masters else ADAMW.without_masters
    sizes, steps = (5, 1, 40_000, 300, 0, 70), (2, 2, 2, 3, 2, 2)
    generator = torch.Generator().manual_seed(1)
    updates, expected = [], []
    for size, step in zip(sizes, steps, strict=True):
        param = torch.randn(size, generator=generator).to(dtype)
        grad = torch.randn(size, generator=generator).to(dtype)
        rows = [row.uniform_(0, 1, generator=generator) for row in rule.zero_rows(size)]
        scalars = rule.scalars(rule.defaults, step)
        state, _, own = rule.inputs(rows, param)
        updates.append(TensorUpdate(grad, state, param, scalars, own))
        copies = [row.clone() for row in rows], param.clone()
        state, written, own = rule.inputs(*copies)
        kernels[1].update(grad, state, written, scalars, rule=own)
        expected.append((copies[1], *copies[0]))
    count = 0
    for update in joined_updates(updates):
        count += 1
        kernels[1].update(
            update.grad, update.state, update.written, update.scalars, rule=update.rule
        )
    # A large one, one of another step, and the others.
    assert count == 3
    for update, tensors in zip(updates, expected, strict=True):
        own = [update.out, *update.state[0 if has_masters else 1 :]]
        assert all(torch.equal(a, b) for a, b in zip(own, tensors, strict=True))


@given(seed=SEEDS, length=st.integers(1, 1000), cut=st.integers(0, 1000))
def test_update__does_not_depend_on_where_a_parameter_is_split(
    kernels: dict[int, CpuKernel], seed: int, length: int, cut: int
) -> None:
    state = any_state(length, torch.bfloat16, torch.bfloat16, seed)
    scalars = Hyper().scalars(2)
    expected = updated(state, scalars)
    for part in (slice(0, cut), slice(cut, length)):
        kernels[2].update(*arguments(tensor[part] for tensor in state), scalars)
    assert_same(state, expected)


def check_code(loop: Any, *arguments: object) -> str:
    """Check that compiled code fuses no operations and approximates none; return it."""
    # numba shows no code that comes from its cache.
    fresh = njit(**compiled._OPTIONS)(loop.py_func)
    fresh(*arguments)
    (code,) = fresh.inspect_asm().values()
    assert "sqrt" in code
    # x86, then ARM; approximations too.
    assert not re.search(
        r"\bv?fn?m(add|sub)|\bfn?ml[as]\b|\bv?(rcp|rsqrt)\d*[ps]s|\bfr(ecp|sqrt)e\b",
        code,
    )
    return str(code)


@pytest.mark.parametrize(
    "stored",
    [
        np.int16,
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in (np.uint16, np.float32)
        ),
    ],
)
def test_compiled_update__fuses_no_operations(stored: type) -> None:
    halves, state = np.zeros((2, 10), stored), np.zeros((3, 10), np.float32)
    check_code(
        compiled.loops_of(ADAMW).update,
        halves[0],
        tuple(state),
        halves[1],
        Hyper().scalars(1),
        0,
    )


@pytest.mark.parametrize("has_masters", [False, True])
def test_compiled_update__computes_many_elements_at_once(has_masters: bool) -> None:
    master, *moments = state = np.zeros((3, 10), np.float32)
    loops, scalars = compiled.loops_of(ADAMW), Hyper().scalars(1)
    if has_masters:
        code = check_code(loops.update, master, tuple(state), master, scalars, 0)
    else:
        code = check_code(
            loops.update_state, master, master, tuple(moments), scalars, 0
        )
    if platform.machine() == "x86_64":
        # Of packed elements, not of one.
        assert re.search(r"\bv?sqrtps\b", code)


@pytest.mark.slow
@pytest.mark.parametrize("stored", [np.int16, np.uint16, np.float32])
def test_compiled_update_beside__fuses_no_operations_and_writes_past_the_caches(
    stored: type,
) -> None:
    halves, old, new = (
        np.zeros((2, 10), stored),
        np.zeros((3, 10), np.float32),
        np.zeros((3, 10), np.float32),
    )
    loop = compiled_beside.update_of(ADAMW)
    code = check_code(
        loop, halves[0], tuple(old), tuple(new), halves[1], Hyper().scalars(1), 0
    )
    if platform.machine() == "x86_64":
        assert "movnt" in code
        assert "sfence" in code


def test_update__keeps_subnormals_if_the_caller_flushes_them(
    kernels: dict[int, CpuKernel],
) -> None:
    state = any_state(5000, torch.bfloat16, torch.bfloat16, 1)
    scalars = Hyper().scalars(1)
    expected = updated(state, scalars)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        kernel = CpuKernel(2)
        kernel.update(*arguments(state), scalars)
        flushed = float(torch.tensor([1e-40]) * torch.ones(1)) == 0.0
    finally:
        torch.set_flush_denormal(False)
    kernel.close()
    assert flushed
    assert_same(state, expected)


def test_update__lets_other_threads_run_python(kernels: dict[int, CpuKernel]) -> None:
    """Another thread sees a slice whose first element is updated and whose last one is
    not; it may need many tries."""
    state = plausible_state(6_000_000, torch.bfloat16, torch.bfloat16, 0)
    master = state[1].numpy()
    for step in range(1, 100):
        first, last = master[0], master[-1]
        working = threading.Thread(
            target=kernels[1].update,
            args=(*arguments(state), Hyper(lr=0.1).scalars(step)),
        )
        working.start()
        seen_midway = False
        while working.is_alive():
            seen_midway = seen_midway or (master[0] != first and master[-1] == last)
        working.join()
        if seen_midway:
            return
    pytest.fail("no other thread ran")


@pytest.mark.parametrize(
    ("index", "wrong"),
    [
        (0, torch.zeros(9)),
        (0, torch.zeros(10, dtype=torch.float64)),
        (1, torch.zeros(10, dtype=torch.bfloat16)),
        (2, torch.zeros(20)[::2]),
        (4, torch.zeros(2, 5)),
        (4, torch.zeros(10, device="meta")),
    ],
)
def test_update__refuses_tensors_that_do_not_match(
    kernels: dict[int, CpuKernel], index: int, wrong: torch.Tensor
) -> None:
    state = plausible_state(10, torch.bfloat16, torch.bfloat16, 0)
    before = [tensor.clone() for tensor in state]
    with pytest.raises(ValueError, match="must"):
        kernels[1].update(
            *arguments([*state[:index], wrong, *state[index + 1 :]]), Hyper().scalars(1)
        )
    assert_same(state, before)


def test_cpu_kernel__uses_the_ranks_share_of_the_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for threads in (8, 1):
        monkeypatch.setattr(host_limits, "rank_cores", lambda threads=threads: threads)
        kernel = CpuKernel()
        assert kernel.threads == threads
        kernel.close()


def test_cpu_kernel__lets_other_threads_run_first() -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    own = niceness()
    kernel = CpuKernel(2)
    for node in (None, 0):
        kernel.bind(node)
        assert {kernel._pool.submit(niceness).result() for _ in range(8)} == {
            min(own + 5, 19)
        }
    kernel.close()
    assert niceness() == own


def test_compiled__works_without_a_cache_folder() -> None:
    namespace: dict[str, object] = {}
    # Code that is in no file cannot be cached.
    exec(
        "def add(values):\n    for i in range(values.size):\n        values[i] += 1",
        namespace,
    )
    values = np.zeros(3)
    compiled.compile_loop(namespace["add"])(values)
    assert values.tolist() == [1, 1, 1]


@pytest.mark.slow
def test_cpu_kernel__imports_numba_at_the_first_kernel() -> None:
    code = """
import sys
import ebbtide.interleave
assert not {"numba", "torch"} & set(sys.modules)
import ebbtide.interleave.engine.numerics.kernels as kernels
assert "numba" not in sys.modules
kernels.CpuKernel(1).close()
assert "numba" in sys.modules
"""
    run = run_process([sys.executable, "-c", code])
    assert run.returncode == 0, run.stderr


def test_update__writes_to_tensors_that_require_grad(
    kernels: dict[int, CpuKernel],
) -> None:
    state = plausible_state(10, torch.float32, torch.float32, 0)
    state[4] = torch.nn.Parameter(state[4])
    kernels[1].update(*arguments(state), Hyper().scalars(1))
    assert torch.equal(bits(state[4].detach()), bits(state[1]))


def test_update_ranges__updates_each_range_with_its_scalars_and_nothing_else(
    kernels: dict[int, CpuKernel],
) -> None:
    length = 40_000
    state = any_state(length, torch.bfloat16, torch.bfloat16, 1)
    bounds = [(begin, begin + 3) for begin in range(0, 3_000, 5)] + [
        (10_000, 38_000),
        (38_000, 38_000),
    ]
    ranges = [
        (begin, end, Hyper(lr=1e-3 * (index + 1)).scalars(2))
        for index, (begin, end) in enumerate(bounds)
    ]
    expected = [tensor.clone() for tensor in state]
    for begin, end, scalars in ranges:
        reference.update(*arguments(tensor[begin:end] for tensor in expected), scalars)
    kernels[3].update_ranges(*arguments(state), ranges)
    assert_same(state, expected)
