"""The kernels of the GPU. Without a GPU, the tests read the compiled code and run them
in Triton's interpreter."""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from typing import Any

import pytest
import torch

from ebbtide.interleave.engine.numerics.fingerprint import BLOCK as FINGERPRINT_BLOCK
from ebbtide.interleave.engine.numerics.norm import BLOCK
from ebbtide.interleave.engine.rules import find_rule
from ebbtide.interleave.engine.rules.adamw import ADAMW
from ebbtide.interleave.engine.rules.rule import UpdateRule
from tests.conftest import run_process
from tests.cuda_runtime.triton_cache import ENVIRONMENT
from tests.interleave.engine.numerics import gpu_checks
from tests.interleave.engine.numerics.gpu_checks import (
    BEGINS,
    check_block_updates,
    check_fingerprints,
    check_own_master_updates,
    check_remainder_updates,
    check_rounded_updates,
    check_sums,
    check_updates,
)
from tests.interleave.engine.states import DTYPES

triton = pytest.importorskip("triton", reason="needs triton, which is for Linux only")


@pytest.mark.gpu
def test_gpu_update__gives_the_bits_of_the_reference() -> None:
    for begin in BEGINS:
        check_updates([0, 1, 1024, 2_000_003], begin, "cuda")
        check_remainder_updates([0, 1, 1024, 2_000_003], begin, "cuda")
        check_own_master_updates([1, 5, 1024, 2_000_003], begin, "cuda")
        check_rounded_updates([1, 1024, 0, 2_000_003], begin, "cuda")
        check_block_updates([1, 1024, 0, 2_000_003], begin, "cuda")


@pytest.mark.gpu
def test_gpu_sums_of_squares__equal_those_of_the_cpu() -> None:
    check_sums([0, 1, BLOCK, 20 * BLOCK + 777], BEGINS, "cuda")


@pytest.mark.gpu
def test_gpu_fingerprint__equals_that_of_the_cpu() -> None:
    check_fingerprints(
        [0, 1, 4 * FINGERPRINT_BLOCK, 80 * FINGERPRINT_BLOCK + 777], BEGINS, "cuda"
    )


@pytest.mark.gpu
def test_warm_up__runs_all_kernels() -> None:
    from ebbtide.interleave.engine.numerics.triton_kernel import warm_up

    warm_up(torch.device("cuda"), [(grad, out) for grad in DTYPES for out in DTYPES])


def test_gpu_kernels__give_the_bits_of_the_reference_in_the_interpreter() -> None:
    """In a separate process: triton.jit chooses the interpreter when it is imported."""
    code = (
        f"from {gpu_checks.__name__} import check_all_in_the_interpreter as check; "
        "check()"
    )
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONWARNINGS": "ignore::RuntimeWarning",
    }
    run = run_process([sys.executable, "-c", code], env=environment)
    assert run.returncode == 0, run.stderr


@pytest.fixture(autouse=True)
def _triton_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


def compile_kernel(
    kernel: str, capability: int, fusion: bool = False, **dtypes: Any
) -> str:
    """Return the PTX of a kernel for GPUs of a compute capability, times ten."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from ebbtide.interleave.engine.numerics import triton_compiled, triton_kernel

    signature = {
        "update": {"table": "*i64", "count": "i32"},
        "block_sums": {"table": "*i64", "sums": "*fp64", "count": "i32"},
        "block_fingerprints": {
            "table": "*i64",
            "fingerprints": "*i64",
            "count": "i32",
            "keys": "*i32",
        },
    }[kernel]
    warps = {
        "update": triton_compiled.UPDATE_WARPS,
        "block_sums": triton_kernel._SUMS_WARPS,
        "block_fingerprints": triton_kernel._FINGERPRINT_WARPS,
    }[kernel]
    source = ASTSource(
        getattr(triton_compiled, kernel),
        {**signature, **dict.fromkeys(dtypes, "constexpr")},
        constexprs=dtypes,
    )
    options = {"enable_fp_fusion": fusion, "num_warps": warps}
    return str(
        triton.compile(
            source, target=GPUTarget("cuda", capability, 32), options=options
        ).asm["ptx"]
    )


def arithmetic(ptx: str) -> set[str]:
    """Return the instructions that compute or convert floating-point numbers."""
    instructions = re.findall(
        r"^\s*(?:@!?%p\d+\s+)?(\w+\.[\w.]*\bb?f(?:16|32|64)(?:x2)?\b[\w.]*)",
        ptx,
        re.MULTILINE,
    )
    return {
        name
        for name in instructions
        if name.split(".")[0] not in {"selp", "setp", "mov", "ld", "st"}
    }


def wide_accesses(ptx: str) -> Counter[str]:
    """Count the vectorized accesses to global memory."""
    return Counter(re.findall(r"\b((?:ld|st)\.global\.v\d\.b\d\d)\b", ptx))


def compile_update(
    capability: int, grad: str, out: str, fusion: bool = False, rule: UpdateRule = ADAMW
) -> str:
    import triton.language as tl

    from ebbtide.interleave.engine.numerics.triton_compiled import formula_of
    from ebbtide.interleave.engine.numerics.triton_kernel import _parts_of

    master = tl.float32 if rule.split is None else tl.uint16
    dtypes = {
        "grad_dtype": getattr(tl, grad),
        "out_dtype": getattr(tl, out),
        "master_dtype": master,
    }
    join, split = _parts_of(rule)
    constants = {
        "join": join,
        "split": split,
        "formula": formula_of(rule),
        "moments": len(rule.moments),
        "factors": len(rule.scalars(rule.defaults, 1)),
        "rounds": rule.rounds,
        "scaled": bool(rule.scales),
    }
    return compile_kernel("update", capability, fusion=fusion, **dtypes, **constants)


PAIRS = ["uint16-uint16", "float16-float16", "float32-float32", "float32-uint16"]
# Each dtype by default, and each kind of arithmetic.
QUICK = {
    (80, "uint16-uint16"),
    (90, "float16-float16"),
    (100, "uint16-uint16"),
    (120, "float16-float16"),
}
ALLOWED = {f"{name}.rn.f32" for name in ("add", "sub", "mul", "div", "sqrt")}
# Blackwell computes two fp32 numbers by one instruction.
PACKED = {f"{name}.rn.f32x2" for name in ("add", "sub", "mul")}
CONVERSIONS = {"cvt.f32.f16", "cvt.rn.f16.f32"}


@pytest.mark.parametrize(
    ("capability", "pair"),
    [
        # Packed operations begin with capability 100.
        pytest.param(
            capability,
            pair,
            marks=[] if (capability, pair) in QUICK else pytest.mark.slow,
        )
        for capability in (80, 90, 100, 120)
        for pair in PAIRS
    ],
)
def test_gpu_update__rounds_every_operation_and_keeps_subnormals_in_ptx(
    capability: int, pair: str
) -> None:
    """Operations with an explicit `.rn` are never fused."""
    grad, out = pair.split("-")
    ptx = compile_update(capability, grad, out)
    instructions = arithmetic(ptx)
    assert instructions <= ALLOWED | PACKED | CONVERSIONS
    assert {"div.rn.f32", "sqrt.rn.f32"} <= instructions
    assert ("float16" in pair) == (instructions >= CONVERSIONS)
    assert not re.search(r"\.(ftz|approx|full)\b|\bfma\b|\bmad\.\w*\.?f", ptx)
    # Four elements by each access, where all elements of a block are there and the
    # tensors are aligned.
    widths = Counter({"ld.global.v4.b32": 3, "st.global.v4.b32": 3})
    for name, dtype in (("ld", grad), ("st", out)):
        widths[f"{name}.global.v{4 if dtype == 'float32' else 2}.b32"] += 1
    assert wide_accesses(ptx) == widths


@pytest.mark.parametrize("capability", [90, 100])
def test_gpu_update__of_remainders_rounds_every_operation_and_moves_26_bytes(
    capability: int,
) -> None:
    ptx = compile_update(
        capability, "uint16", "uint16", rule=find_rule("adamw-remainder")
    )
    assert {"div.rn.f32", "sqrt.rn.f32"} <= arithmetic(ptx) <= ALLOWED | PACKED
    # Four elements by each access: read gradient, parameter, remainder and moments,
    # write all but the gradient.
    counts = {
        "ld.global.v2.b32": 3,
        "ld.global.v4.b32": 2,
        "st.global.v2.b32": 2,
        "st.global.v4.b32": 2,
    }
    assert wide_accesses(ptx) == Counter(counts)


def test_gpu_update__of_bfloat16_moments_rounds_every_operation_and_moves_20_bytes() -> (
    None
):
    ptx = compile_update(90, "uint16", "uint16", rule=find_rule("adamw-bf16"))
    # The seed of the random numbers is converted.
    assert (
        {"div.rn.f32", "sqrt.rn.f32"}
        <= arithmetic(ptx)
        <= ALLOWED | PACKED | {"cvt.rzi.u32.f32"}
    )
    counts = {
        "ld.global.v2.b32": 3,
        "ld.global.v4.b32": 1,
        "st.global.v2.b32": 3,
        "st.global.v4.b32": 1,
    }
    assert wide_accesses(ptx) == Counter(counts)


def test_gpu_update__of_8_bit_moments_rounds_every_operation_and_moves_codes() -> None:
    ptx = compile_update(90, "uint16", "uint16", rule=find_rule("adamw-8bit"))
    assert {"div.rn.f32", "sqrt.rn.f32"} <= arithmetic(ptx) <= ALLOWED | PACKED
    assert not re.search(r"\.(ftz|approx|full)\b|\bfma\b|\bmad\.\w*\.?f", ptx)
    # Four elements by each access: gradient, master and parameter; codes are four
    # bytes.
    counts = {
        "ld.global.v2.b32": 1,
        "ld.global.v4.b32": 1,
        "st.global.v2.b32": 1,
        "st.global.v4.b32": 1,
    }
    assert wide_accesses(ptx) == Counter(counts)


def test_arithmetic__shows_fused_operations() -> None:
    """The functions of these tests see what they look for."""
    for capability, packed in ((80, ""), (100, "x2")):
        assert f"fma.rn.f32{packed}" in arithmetic(
            compile_update(capability, "uint16", "uint16", fusion=True)
        )


@pytest.mark.parametrize(
    "capability",
    [90, *(pytest.param(other, marks=pytest.mark.slow) for other in (80, 100, 120))],
)
def test_kernels_by_block__load_wide_and_sum_in_fp64_in_ptx(capability: int) -> None:
    import triton.language as tl

    sums = compile_kernel("block_sums", capability, dtype=tl.uint16)
    assert arithmetic(sums) == {"cvt.f64.f32", "mul.rn.f64", "add.rn.f64"}
    # Eight rows of lanes are in flight together.
    assert wide_accesses(sums) == {"ld.global.v4.b32": 8}
    assert wide_accesses(compile_kernel("block_fingerprints", capability)) == {
        "ld.global.v2.b64": 8
    }
