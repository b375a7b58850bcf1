"""Sparse tensors on the device: peaks of dry runs are those of eager runs, to the
byte."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.features.dryrun.forked import run_forked
from tests.features.dryrun.random_jobs import dry_run_peak_bytes, eager_peak_bytes
from tests.features.dryrun.test_session import dry_run

ROWS, WIDTH, READ = 500, 32, 64
_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SparseAdam": lambda parameters: torch.optim.SparseAdam(list(parameters)),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, foreach=False),
}


class SparseJob:
    """Training of an embedding with sparse gradients; no index is read twice.

    Attributes:
        iterations: Iterations of a dry run that see the whole job.
    """

    iterations = 2

    def __init__(self, optimizer: str, reads: int) -> None:
        self._optimizer, self._reads = optimizer, reads

    def run(self, device: str) -> None:
        """Run the job."""
        model = nn.Embedding(ROWS, WIDTH, sparse=True).to(device)
        optimizer = _OPTIMIZERS[self._optimizer](model.parameters())
        for _ in range(4):
            parts = [
                model(torch.arange(READ, device=device) + READ * number)
                for number in range(self._reads)
            ]
            loss = sum(part.square().mean() for part in parts)
            assert isinstance(loss, torch.Tensor)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("optimizer", _OPTIMIZERS)
@pytest.mark.parametrize("reads", [1, 3])
def test_sparse_gradients__have_the_peak_of_an_eager_run(
    optimizer: str, reads: int
) -> None:
    job: Any = SparseJob(optimizer, reads)
    eager = run_forked(lambda: eager_peak_bytes(job))
    assert run_forked(lambda: dry_run_peak_bytes(job)) == eager


def _observe_graph() -> tuple[list[Any], list[int], list[str]]:
    """Return what a layer of a graph network gives, and its kernels."""
    seen: list[Any] = []

    def job() -> None:
        ends = torch.randint(ROWS, (2, 900))
        graph = torch.sparse_coo_tensor(ends, torch.ones(900), (ROWS, ROWS)).cuda()
        layer = nn.Linear(WIDTH, WIDTH).cuda()
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        x = torch.randn(ROWS, WIDTH, device="cuda")
        for _ in range(3):
            y = torch.sparse.mm(graph, layer(x))
            y.square().mean().backward()
            optimizer.step()
        seen.extend([graph._nnz(), (2 * graph).coalesce()._nnz(), graph.t().shape])
        seen.extend([(graph + graph)._nnz(), graph.to_dense().shape, tuple(y.shape)])

    run, _ = dry_run(job, 5)
    sizes = [block.size for block in run.memory.blocks]
    return seen, sizes, [kernel.work.name for kernel in run.clock.kernels]


def test_sparse_matrix__multiplies_dense_ones() -> None:
    seen, sizes, kernels = run_forked(_observe_graph)
    assert seen == [900, 900, (ROWS, ROWS), 1800, (ROWS, ROWS), (ROWS, WIDTH)]
    # int64 positions of two dimensions
    assert 900 * 8 * 2 in sizes
    assert ROWS * WIDTH * 4 in sizes
    assert kernels.count("aten::mm") >= 3
