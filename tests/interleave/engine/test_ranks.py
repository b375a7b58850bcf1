"""Several ranks: shards of FSDP2, replicas of DDP, and checkpoints that another number
of ranks loads."""

from __future__ import annotations

import multiprocessing
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.multiprocessing
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from tests.conftest import PROCESS_TIMEOUT_S, run_process, shared_folder
from tests.features.matrices import matrix_rank_jobs
from tests.interleave.engine import (
    compiled_rank_jobs,
    grid_rank_jobs,
    late_rank_jobs,
    rank_jobs,
    speculative_rank_jobs,
)
from tests.interleave.engine.grid.job import RANKS
from tests.interleave.engine.jobs import closing
from tests.interleave.engine.training import ReferenceOptimizer, batches, maker, net

Results = dict[str, Any]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Results, Path]:
    """Run all jobs in one start of the ranks, which takes longer than the jobs; return
    the results and the folder."""
    others = (
        late_rank_jobs.JOBS
        + speculative_rank_jobs.JOBS
        + matrix_rank_jobs.JOBS
        + grid_rank_jobs.JOBS
    )
    folder = shared_folder(
        tmp_path_factory,
        "ranks",
        lambda folder: run_ranks(folder, rank_jobs.JOBS + others),
    )
    return torch.load(folder / "results", weights_only=True), folder


def test_ranks__two_ranks_give_the_results_of_one(ranks: tuple[Results, Path]) -> None:
    results, folder = ranks
    shards_have_the_same_bits_under_every_policy(results["every_policy"])
    two_shards_do_what_one_rank_does(results["every_policy"])
    one_rank_goes_on_from_a_checkpoint_of_two(results["saved"], folder)
    replicas_have_the_bits_of_one_process(results["replicated"])
    assert "max_grad_norm" in results["clipped_by_torch"]["error"]
    assert "fully_shard" in results["replicated_and_streamed"]["error"]
    assert set(results["with_empty_shards"].values()) == {4}
    assert results["saved_in_8_bits"]["equal"]


def test_late_updates__change_no_bits_of_replicated_models(
    ranks: tuple[Results, Path],
) -> None:
    results, _ = ranks
    assert (
        results["late_replicas"]
        == results["late_replicas_with_uneven_inputs"]
        == {"ddp": True, "plain": True}
    )


def test_speculative_updates__change_no_bits_of_sharded_models(
    ranks: tuple[Results, Path],
) -> None:
    results, _ = ranks
    assert len(results["speculative_shards"]) == 4
    assert all(results["speculative_shards"].values())


def test_sharded_matrices__have_the_bits_of_one_process_under_every_policy(
    ranks: tuple[Results, Path],
) -> None:
    results, _ = ranks
    assert results["matrices_under_every_policy"] == {
        "equal": True,
        "one process": True,
        # Two of the three matrices, or one and the row.
        "momentum bytes": [4 * (2 * 25 * 25), 4 * (25 * 25 + 25)],
    }
    assert results["resumed_matrices"]["equal"]


def test_sharded_matrices__fail_on_all_ranks(ranks: tuple[Results, Path]) -> None:
    ((other, closed), (own, _)) = ranks[0]["failed_matrices"]["errors"]
    assert "failed midway on another rank" in other
    assert "its state is lost" in own
    assert "closed" in closed


TWO_DIMENSIONS = """
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from ebbtide.interleave import InterleavedOptimizer
from ebbtide.interleave.engine.errors import EngineError

torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
mesh = init_device_mesh("cpu", (2, 2))
param = torch.nn.Parameter(distribute_tensor(torch.zeros(4, 4), mesh, [Shard(0), Shard(1)]))
try:
    InterleavedOptimizer([param], "muon")
except EngineError as error:
    print(error)
"""


@pytest.mark.slow
def test_sharded_matrices__are_refused_in_two_dimensions() -> None:
    done = run_process([sys.executable, "-c", TWO_DIMENSIONS])
    assert done.stdout.startswith(
        "matrices are sharded over several groups of ranks"
    ), done.stderr


def test_late_updates__need_the_gates(ranks: tuple[Results, Path]) -> None:
    losses = ranks[0]["reads_of_late_parameters"]
    assert losses["gates"] == losses["no overlap"]
    assert losses["no gates"] != losses["no overlap"]


def test_late_updates__refuse_other_shards_and_replicas(
    ranks: tuple[Results, Path],
) -> None:
    messages = ranks[0]["refused"]
    assert "DTensors that fully_shard did not make" in messages["tensor parallel"]
    assert f"fully_shard of torch {torch.__version__}" in messages["unknown"]
    assert "FullyShardedDataParallel (FSDP1)" in messages["flat"]
    assert "mixed_precision of DistributedDataParallel" in messages["converted"]


@pytest.mark.slow
def test_late_updates__change_no_bits_of_compiled_models(tmp_path: Path) -> None:
    run_ranks(tmp_path, compiled_rank_jobs.JOBS)
    assert torch.load(tmp_path / "results") == {
        "compiled_shards": True,
        "compiled_replicas": True,
    }


def test_random_jobs__have_the_bits_of_the_plain_job_on_the_same_ranks(
    ranks: tuple[Results, Path],
) -> None:
    results, _ = ranks
    assert results["random_grid"]["wrong"] == []
    assert any(name.endswith("equal") for name in results["random_grid"]["counts"])


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_random_jobs__of_every_kind_have_the_bits_on_ranks(
    count: int, tmp_path: Path
) -> None:
    run_ranks(tmp_path, (grid_rank_jobs.many_of_the_grid,), count, limit_s=900)
    results = torch.load(tmp_path / "results")["many_of_the_grid"]
    assert results["wrong"] == []
    assert {f"{kind} equal" for kind in RANKS} <= set(results["counts"])


def run_ranks(
    folder: Path,
    jobs: tuple[Any, ...],
    count: int = rank_jobs.RANKS,
    limit_s: float = PROCESS_TIMEOUT_S,
) -> None:
    """Run jobs on all ranks; kill them and fail if they take too long."""
    # The ranks are forks of one process that has imported all: with FSDP that takes
    # longer than most of the jobs.
    multiprocessing.set_forkserver_preload(
        [job.__module__ for job in jobs] + ["torch._dynamo"]
    )
    ranks = torch.multiprocessing.start_processes(
        rank_jobs.main,
        (folder, jobs, count),
        nprocs=count,
        join=False,
        daemon=True,
        start_method="forkserver",
    )
    deadline = time.monotonic() + limit_s
    while not ranks.join(timeout=max(0.0, deadline - time.monotonic())):
        if time.monotonic() >= deadline:
            for process in ranks.processes:
                process.kill()
            pytest.fail(f"the ranks did not finish within {limit_s:g} s")


def one_process() -> dict[str, torch.Tensor]:
    """Run the job of the ranks with the reference in one process.

    As in DDP, each rank adds its gradient to the mean so far, and the mean is computed
    again."""
    model = net(torch.float32)
    params = list(model.parameters())
    optimizer = ReferenceOptimizer(params, max_grad_norm=0.3)
    data = batches(torch.float32)
    for step in range(rank_jobs.STEPS):
        sums: list[Any] = [None] * len(params)
        for _ in range(rank_jobs.backwards(step)):
            batch = next(data)
            gradients_by_rank = []
            for rank in range(rank_jobs.RANKS):
                loss = rank_jobs.loss_of(
                    model, batch, step, slice(rank, None, rank_jobs.RANKS)
                )
                gradients_by_rank.append(
                    torch.autograd.grad(loss, params, allow_unused=True)
                )
            for index, (one, other) in enumerate(zip(*gradients_by_rank, strict=True)):
                if one is not None:
                    before = 0.0 if sums[index] is None else sums[index]
                    sums[index] = (before + one) / 2 + (before + other) / 2
        for param, gradient in zip(params, sums, strict=True):
            param.grad = gradient
        optimizer.step()
    return {name: param.detach() for name, param in model.named_parameters()}


def shards_have_the_same_bits_under_every_policy(by_case: Results) -> None:
    (expected_losses, expected), *others = by_case.values()
    assert len(others) == len(rank_jobs.CASES) - 1
    for losses, params in others:
        assert losses == expected_losses
        assert all(torch.equal(params[name], expected[name]) for name in expected)


def two_shards_do_what_one_rank_does(by_case: Results) -> None:
    """Compare with one process, within rounding of the reduced gradients."""
    _, params = by_case["interleaved:2 streamed"]
    expected = one_process()
    moved = max(
        float((value - start).abs().max())
        for value, start in zip(expected.values(), starts(), strict=True)
    )
    assert moved > 3e-3
    for name, value in expected.items():
        torch.testing.assert_close(params[name], value, rtol=0, atol=1e-5)


def starts() -> list[torch.Tensor]:
    return [param.detach() for param in net(torch.float32).parameters()]


def one_rank_goes_on_from_a_checkpoint_of_two(saved: Results, folder: Path) -> None:
    model = net(torch.float32)
    with closing(
        maker("gpu-only", "kept", subgroup_params=700)(model.parameters())
    ) as optimizer:
        state = {
            "model": model.state_dict(),
            "optimizer": get_optimizer_state_dict(model, optimizer),
        }
        dcp.load(state, checkpoint_id=folder / "checkpoint", no_dist=True)
        model.load_state_dict(state["model"])
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
        loaded = get_optimizer_state_dict(model, optimizer)["state"]
        assert loaded.keys() == saved["state"].keys()
        for name, entry in saved["state"].items():
            assert (
                entry.keys() == loaded[name].keys() >= {"step", "exp_avg", "exp_avg_sq"}
            )
            for key, value in entry.items():
                assert torch.equal(loaded[name][key], value), (name, key)
        params = dict(model.named_parameters())
        for name, value in saved["params"].items():
            assert torch.equal(params[name], value)


def test_get_optimizer_state_dict__changes_nothing() -> None:
    """torch calls the step of an optimizer that seems to have no state yet."""
    model = net(torch.float32)
    with closing(maker("interleaved:2", "kept")(model.parameters())) as optimizer:
        rank_jobs.loss_of(
            model, next(batches(torch.float32)), 0, slice(None)
        ).backward()
        optimizer.step()
        optimizer.zero_grad()
        before = optimizer.state_dict()["state"]
        get_optimizer_state_dict(model, optimizer)
        after = optimizer.state_dict()["state"]
        for index, entry in before.items():
            assert all(
                torch.equal(after[index][key], value) for key, value in entry.items()
            )


def replicas_have_the_bits_of_one_process(params: Results) -> None:
    assert all(
        torch.equal(params[name], value) for name, value in one_process().items()
    )
