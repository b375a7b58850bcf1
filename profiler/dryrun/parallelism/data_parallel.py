"""Runs the reduction of gradients of DistributedDataParallel in a dry run."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from ebbtide.profiler.agent.patches import Patches
from ebbtide.profiler.dryrun.collectives import Collectives

_Hook = Callable[[Any, Any], Any]


@dataclass
class _Reduction:
    """The reduction of a reducer's buckets: by a hook of the job, with its state, or an all-reduce in place."""

    group: Any
    collectives: Collectives
    hook: _Hook | None = None
    state: Any = None


def patch_data_parallel(patches: Patches, collectives: Collectives) -> None:
    """Give every reducer a communication hook until `patches.undo()`: its own reduction needs real works.

    Args:
        patches: The replacements.
        collectives: Runs the collectives.
    """
    reductions: weakref.WeakKeyDictionary[Any, _Reduction] = weakref.WeakKeyDictionary()
    register = dist._register_comm_hook

    def wrap_init(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def init(model: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(model, *args, **kwargs)
            reductions[model.reducer] = reduction = _Reduction(model.process_group, collectives)
            register(model.reducer, reduction, _reduce)
            return result

        return init

    def register_hook(reducer: Any, state: Any, hook: _Hook) -> None:
        reductions[reducer].hook, reductions[reducer].state = hook, state

    def register_builtin_hook(reducer: Any, kind: Any) -> None:
        compresses = kind == dist.BuiltinCommHookType.FP16_COMPRESS
        register_hook(reducer, reductions[reducer].group, fp16_compress_hook if compresses else allreduce_hook)

    patches.wrap(DistributedDataParallel, "_ddp_init_helper", wrap_init)
    # Its statistics need a timer of CUDA.
    patches.set(dist.Logger, "set_runtime_stats_and_log", lambda _logger: None)
    patches.set(dist, "_register_comm_hook", register_hook)
    patches.set(dist, "_register_builtin_comm_hook", register_builtin_hook)


def _reduce(state: _Reduction, bucket: dist.GradBucket) -> torch.futures.Future[Any]:
    """Reduce a bucket, and let the end of the backward wait for it."""
    torch.autograd.Variable._execution_engine.queue_callback(state.collectives.wait_for_all)
    if state.hook is not None:
        return state.hook(state.state, bucket)
    buffer = bucket.buffer()
    dist.all_reduce(buffer, group=state.group, async_op=True)
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(buffer)
    return future
