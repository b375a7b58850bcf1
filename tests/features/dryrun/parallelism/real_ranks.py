"""Runs a job on the CPU in two real ranks, and counts the bytes of the tensors of rank
0."""

from __future__ import annotations

import os
import tempfile
import weakref
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from tests.features.dryrun.forked import run_forked
from tests.features.dryrun.parallelism.jobs import JOBS


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages of plain tensors. Attributes: now, most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._live: dict[int, tuple[int, Any]] = {}

    def __enter__(self) -> Any:
        resize = torch.UntypedStorage.resize_

        def resize_storage(storage: Any, size: int) -> Any:
            result = resize(storage, size)
            if storage._cdata in self._live:
                self._set(storage)
            return result

        torch.UntypedStorage.resize_ = resize_storage
        return super().__enter__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(kind.__name__ in ("DTensor", "AsyncCollectiveTensor") for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if (
                type(tensor) is torch.Tensor
                and tensor.untyped_storage()._cdata not in self._live
            ):
                self._set(tensor.untyped_storage())
        return result

    def _set(self, storage: Any) -> None:
        key = storage._cdata
        self._drop(key)
        self._live[key] = (
            storage.nbytes(),
            weakref.ref(storage, lambda _: self._drop(key)),
        )
        self.now += storage.nbytes()
        self.most = max(self.most, self.now)

    def _drop(self, key: int) -> None:
        self.now -= self._live.pop(key, (0, None))[0]


def run_real(name: str) -> dict[str, int]:
    """Return the peak and the bytes by category of rank 0 of two."""

    def run() -> dict[str, int]:
        with tempfile.TemporaryDirectory() as folder:
            other = os.fork()
            try:
                result = _run_rank(name, 0 if other else 1, Path(folder) / "store")
            finally:
                if not other:
                    os._exit(0)
            os.waitpid(other, 0)
        return result

    return run_forked(run)  # type: ignore[no-any-return]


def _run_rank(name: str, rank: int, store: Path) -> dict[str, int]:
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2
    )
    sizes: dict[str, int] = {}

    def count(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        parameters = [
            parameter
            for group in optimizer.param_groups
            for parameter in group["params"]
        ]
        moments = [
            state[key]
            for state in optimizer.state.values()
            for key in ("exp_avg", "exp_avg_sq")
        ]
        sizes.update(
            parameter=_bytes_of(parameters), optimizer_state=_bytes_of(moments)
        )
        sizes["gradient"] = _bytes_of([parameter.grad for parameter in parameters])

    register_optimizer_step_post_hook(count)
    with LiveBytes() as live:
        JOBS[name]("cpu")
    dist.barrier()
    return {**sizes, "most": live.most}


def _bytes_of(tensors: list[Any]) -> int:
    local = [
        tensor.to_local() if hasattr(tensor, "to_local") else tensor
        for tensor in tensors
    ]
    return sum(tensor.numel() * tensor.element_size() for tensor in local)
