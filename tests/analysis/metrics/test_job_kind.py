"""The kind of a job of a dry run, by its kernels and weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from ebbtide.analysis.metrics.job_kind import kind_of_trace
from ebbtide.machines.evidence import JobKind
from ebbtide.profiler.trace import TraceBuilder

PRODUCTS = ["aten::addmm"] * 10 + ["aten::mm"] * 20
CASTS = ["aten::_to_copy"] * 12
ATTENTION = ["aten::_scaled_dot_product_flash_attention"]
COMPILED = "torch.compile was left out: the memory is that of the eager model"


def kind_of_job(
    path: Path,
    kernels: list[str],
    dtypes: dict[str, int],
    convolved: float = 0.0,
    notes: tuple[str, ...] = (),
) -> JobKind:
    """Return the kind of a job with these kernels; `convolved`: the share of
    operations in a convolution beside them."""
    builder = TraceBuilder(
        "predicted", prediction={"machine": "", "assumptions": {}, "times": []}
    )
    for note in notes:
        builder.note(note)
    rank = builder.rank(
        0,
        devices=[{"device": "cuda:0", "kind": "cuda", "name": "NVIDIA H200"}],
        model={"params": sum(dtypes.values()), "dtypes": dtypes},
        framework={"tokens": 4096, "micro_batch": 2},
    )
    names = [*kernels, "aten::convolution"] if convolved else kernels
    share = int(1e9 * (1 - convolved) / len(kernels))
    flops = [share] * len(kernels) + [int(1e9 * convolved)] * bool(convolved)
    rank.extend(
        "kernels",
        device="cuda:0",
        start_ns=list(range(len(names))),
        end_ns=list(range(1, 1 + len(names))),
        kind=["compute"] * len(names),
        name=names,
        flops=flops,
        bytes=[1] * len(names),
    )
    return kind_of_trace(builder.write(path / "run.ebb"))


@pytest.mark.parametrize(
    ("kernels", "dtypes", "precision"),
    [
        (PRODUCTS, {"float32": 100}, "float32"),
        # A mask is cast, and under autocast what products take.
        ([*PRODUCTS, "aten::_to_copy"], {"float32": 100}, "float32"),
        (PRODUCTS + CASTS, {"float32": 100}, "half"),
        (PRODUCTS, {"bfloat16": 100}, "half"),
        # Adapters in fp32 beside weights in 16 and 4 bits.
        (PRODUCTS, {"bfloat16": 90, "float32": 10}, "half"),
        (PRODUCTS, {"uint8": 80, "bfloat16": 10, "float32": 10}, "half"),
    ],
)
def test_kind_of_trace__has_the_precision_of_most_work(
    tmp_path: Path, kernels: list[str], dtypes: dict[str, int], precision: str
) -> None:
    assert kind_of_job(tmp_path, kernels, dtypes).precision == precision


@pytest.mark.parametrize(
    ("kernels", "convolved", "layers"),
    [
        (PRODUCTS, 0.0, "other"),
        (PRODUCTS + ATTENTION, 0.1, "transformer"),
        (PRODUCTS + ATTENTION, 0.5, "both"),
        (PRODUCTS + ATTENTION, 0.9, "convolutions"),
    ],
)
def test_kind_of_trace__has_the_layers_of_most_operations(
    tmp_path: Path, kernels: list[str], convolved: float, layers: str
) -> None:
    kind = kind_of_job(tmp_path, kernels, {"bfloat16": 1}, convolved)
    assert kind == JobKind(layers, "eager", "middle", "half", "1", "H200")


def test_kind_of_trace__knows_compiled_jobs(tmp_path: Path) -> None:
    kind = kind_of_job(tmp_path, PRODUCTS, {"bfloat16": 1}, notes=(COMPILED,))
    assert kind.runtime == "fused"
