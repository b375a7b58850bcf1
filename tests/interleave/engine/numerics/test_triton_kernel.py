"""The kernel of the GPU. Without a GPU, the tests read the compiled code and run it in Triton's interpreter."""

from __future__ import annotations

import math
import os
import re
import sys

import pytest
import torch

from ebbtide.interleave.engine.numerics.fingerprint import fingerprint
from ebbtide.interleave.engine.numerics.norm import BLOCK, sum_of_squares
from ebbtide.interleave.engine.numerics.reference import Hyper
from tests.conftest import run_process
from tests.interleave.engine.states import DTYPES, any_bits, any_state, assert_same, plausible_state, updated

triton = pytest.importorskip("triton", reason="needs triton, which comes with CUDA builds of torch")
CASES = [(grad, out) for grad in DTYPES for out in DTYPES]


@pytest.mark.gpu
@pytest.mark.parametrize("make", [any_state, plausible_state])
@pytest.mark.parametrize("hyper", [Hyper(), Hyper(1e-2, 0.3, 0.5, 0.0, 0.0)])
@pytest.mark.parametrize(("grad", "out"), CASES)
def test_gpu_update__gives_the_bits_of_the_reference(
    make: object, hyper: Hyper, grad: torch.dtype, out: torch.dtype
) -> None:
    check_updates(make, hyper, grad, out, 3_000_001, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [0, 1, BLOCK, 20 * BLOCK + 777])
def test_gpu_sum_of_squares__equals_that_of_the_cpu(dtype: torch.dtype, length: int) -> None:
    check_sums(dtype, length, "cuda")


def check_updates(make: object, hyper: Hyper, grad: torch.dtype, out: torch.dtype, length: int, device: str) -> None:
    from ebbtide.interleave.engine.numerics.triton_kernel import gpu_update

    for begin in (0, 3):
        state = make(length, grad, out, 0)  # type: ignore[operator]
        scalars = hyper.scalars(3, 0.7)
        expected = updated(state, scalars)
        device_state = [tensor.to(device) for tensor in state]
        for part in (slice(0, begin), slice(begin, length)):
            gpu_update(*(tensor[part] for tensor in device_state), scalars)
        assert_same(device_state, expected)


def check_sums(dtype: torch.dtype, length: int, device: str) -> None:
    from ebbtide.interleave.engine.numerics.triton_kernel import gpu_sum_of_squares

    gradient = torch.randn(length, generator=torch.Generator().manual_seed(length)).to(dtype)
    assert gpu_sum_of_squares(gradient.to(device))() == sum_of_squares(gradient)
    if length:
        gradient[length // 2] = math.inf
        assert gpu_sum_of_squares(gradient.to(device))() == math.inf


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_gpu_fingerprint__equals_that_of_the_cpu(dtype: torch.dtype) -> None:
    check_fingerprints(dtype, "cuda")


def check_fingerprints(dtype: torch.dtype, device: str) -> None:
    from ebbtide.interleave.engine.numerics.triton_kernel import gpu_fingerprint

    generator = torch.Generator().manual_seed(0)
    values = [any_bits(length, dtype, generator) for length in (0, 1, 777, BLOCK, 2 * BLOCK + 1500)]
    values.append(values[-1][1:])
    assert gpu_fingerprint([value.to(device) for value in values])() == list(map(fingerprint, values))


def check_all_in_the_interpreter() -> None:
    for grad, out in CASES:
        for hyper in (Hyper(), Hyper(1e-2, 0.3, 0.5, 0.0, 0.0)):
            for make in (any_state, plausible_state):
                check_updates(make, hyper, grad, out, 3000, "cpu")
    for dtype in DTYPES:
        check_sums(dtype, BLOCK + 777, "cpu")
        check_fingerprints(dtype, "cpu")


def test_gpu_kernels__give_the_bits_of_the_reference_in_the_interpreter() -> None:
    """In a separate process: triton.jit chooses the interpreter when it is imported."""
    code = f"from {__name__} import check_all_in_the_interpreter as check; check()"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = run_process([sys.executable, "-c", code], env=environment)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("half", ["u16", "fp16", "fp32"])
def test_gpu_update__has_explicit_rounding_and_no_flushing_in_ptx(half: str) -> None:
    """Operations with an explicit `.rn` are never fused."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from ebbtide.interleave.engine.numerics import triton_kernel

    pointers = {"grad": f"*{half}", "master": "*fp32", "exp_avg": "*fp32", "exp_avg_sq": "*fp32", "out": f"*{half}"}
    scalars = dict.fromkeys(Hyper().scalars(1)._fields, "fp32")
    source = ASTSource(
        triton_kernel._update,
        {**pointers, "length": "i32", **scalars, "size": "constexpr"},
        constexprs={"size": 1024},
    )
    ptx = triton.compile(source, target=GPUTarget("cuda", 80, 32), options={"enable_fp_fusion": False}).asm["ptx"]
    operations = set(re.findall(r"\b((?:fma|mad|add|sub|mul|div|sqrt|rcp|rsqrt|ex2)\.\S*f32)\b", ptx))
    assert operations == {f"{name}.rn.f32" for name in ("add", "sub", "mul", "div", "sqrt")}
