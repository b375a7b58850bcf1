"""Pickles with tensors of the device: memory that is shared is shared again, and counts
once."""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch import nn

from tests.features.dryrun.forked import run_forked
from tests.features.dryrun.test_session import dry_run


def test_pickled_tensors__are_views_of_the_same_memory() -> None:
    def job() -> Any:
        x = torch.randn(100, 64, device="cuda")
        tensors = {"whole": x, "rows": x[10:20], "columns": x.t()}
        model = nn.Linear(64, 8).cuda()
        model.weight.own = "kept"  # type: ignore[assignment]
        before = torch.cuda.memory_allocated()
        read, again = pickle.loads(pickle.dumps((tensors, model)))
        taken = torch.cuda.memory_allocated() - before
        keys = {tensor.untyped_storage()._cdata for tensor in read.values()}
        optimizer = torch.optim.SGD(again.parameters(), lr=0.1)
        for _ in range(3):
            read["rows"].add_(1)
            loss = again(read["rows"]).sum() + again(read["columns"].t()).sum()
            loss.backward()
            optimizer.step()
        shapes = [tuple(tensor.stride()) for tensor in read.values()]
        shapes.append(tuple(read["rows"].view(5, -1).shape))
        is_parameter = isinstance(again.weight, nn.Parameter)
        return taken, len(keys), shapes, is_parameter, again.weight.own

    def run() -> Any:
        return dry_run(job, 9)[1]

    taken, storages, shapes, is_parameter, own = run_forked(run)
    # 25,600 and 2,048 bytes, and the bias, which takes 512
    assert (taken, storages) == (25_600 + 2_048 + 512, 1)
    assert shapes == [(64, 1), (64, 1), (1, 64), (5, 128)]
    assert (is_parameter, own) == (True, "kept")
