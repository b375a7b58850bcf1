"""Memory of rank 0 in dry runs of several ranks, against arithmetic and against two
real ranks on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from ebbtide.features.dryrun.session import DryRun, DryRunOptions
from tests.conftest import slow
from tests.features.dryrun.forked import run_forked
from tests.features.dryrun.parallelism.jobs import (
    BLOCK_PARAMS,
    JOBS,
    PARAMS,
    SPLIT_PARAMS,
    VOCABULARY,
    WIDTH,
)
from tests.features.dryrun.parallelism.real_ranks import run_real

CATEGORIES = ("parameter", "gradient", "optimizer_state")
# The host counts the step of each parameter, 4 B; on the device it is a tensor of the
# host.
STEP_BYTES = 200
# Threads of gloo hold what they send for longer than a GPU's streams do, and not always
# for as long.
GLOO_SHARE = {
    "fsdp": 0.05,
    "fsdp-keep": 0.05,
    "fsdp-mixed": 0.15,
    "pipeline": 0.01,
    "pipeline-1f1b": 0.01,
}
# A rank that waits for its processor releases what it has sent later yet: of several
# runs the one with the least counts.
_FURTHER_RUNS = 3
# Sequence parallelism copies more on a GPU.
MORE = {"sequence": 1.01}


def predict(name: str, ranks: int) -> dict[str, int]:
    """Return the peak without workspaces, and the bytes by category, of rank 0."""

    def run() -> dict[str, int]:
        with DryRun(DryRunOptions(ranks=ranks)) as dry:
            dist.init_process_group("nccl")
            JOBS[name]("cuda")
        assert dry.finished
        sizes = {
            category: sum(
                b.size
                for b in dry.memory.blocks
                if b.category == category and b.end_ns is None
            )
            for category in CATEGORIES
        }
        workspaces = sum(
            block.size for block in dry.memory.blocks if block.category == "temporary"
        )
        return {**sizes, "most": dry.memory.most_bytes - workspaces}

    return run_forked(run)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "name",
    slow(
        [
            "ddp",
            "ddp-view",
            "fsdp",
            "fsdp-keep",
            "fsdp-mixed",
            "tensor",
            "sequence",
            "pipeline",
            "pipeline-1f1b",
        ],
        but=("fsdp",),
    ),
)
def test_memory__is_that_of_two_real_ranks(name: str) -> None:
    predicted, real = predict(name, 2), run_real(name)
    assert [predicted[category] for category in CATEGORIES] == [
        real[category] for category in CATEGORIES
    ]
    most, kept = real["most"], 1 - GLOO_SHARE.get(name, 0)
    for _ in range(_FURTHER_RUNS):
        if most * kept - STEP_BYTES > predicted["most"]:
            most = min(most, run_real(name)["most"])
    assert most * kept - STEP_BYTES <= predicted["most"] <= most * MORE.get(name, 1)


def _expected(params: int, gradients: int | None = None) -> dict[str, int]:
    return {
        "parameter": 4 * params,
        "gradient": 4 * (gradients or params),
        "optimizer_state": 8 * params,
    }


@pytest.mark.parametrize(
    ("name", "ranks", "expected"),
    [
        ("tensor-fsdp", 4, _expected((PARAMS - SPLIT_PARAMS // 2) // 2)),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("ddp", 8, _expected(PARAMS)),
                ("fsdp", 8, _expected(PARAMS // 8)),
                ("ddp-hook", 8, _expected(PARAMS)),
                ("ddp-unused", 8, _expected(PARAMS)),
                ("ddp-no-sync", 8, _expected(PARAMS)),
                ("fsdp-meta", 8, _expected(PARAMS // 8)),
                ("hybrid", 8, _expected(PARAMS // 2)),
                ("tensor", 2, _expected(PARAMS - SPLIT_PARAMS // 2)),
                ("pipeline", 4, _expected(VOCABULARY * WIDTH + BLOCK_PARAMS)),
            ]
        ),
    ],
)
def test_memory__is_the_share_of_a_rank(
    name: str, ranks: int, expected: dict[str, int]
) -> None:
    sizes: dict[str, Any] = predict(name, ranks)
    del sizes["most"]
    assert sizes == expected


@pytest.mark.slow
def test_memory__of_offloaded_shards_is_the_hosts() -> None:
    offloaded, sharded = predict("fsdp-offload", 2), predict("fsdp", 2)
    assert [offloaded[category] for category in CATEGORIES] == [0, 0, 0]
    assert (
        sharded["most"] - offloaded["most"]
        == sharded["parameter"] + sharded["optimizer_state"]
    )
