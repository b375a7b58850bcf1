"""Runs torch's own data, tensor and pipeline parallelism in a dry run."""

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    fp16_compress_hook,
)
from torch.nn.parallel import DistributedDataParallel

from ebbtide.features.dryrun.peers import Peers
from ebbtide.features.dryrun.torch_2_13.device.collectives import Collectives
from ebbtide.features.dryrun.torch_2_13.device.fake_device import (
    FakeDeviceMode,
    HostlessFakeMode,
)
from ebbtide.profiler.agent.patches import Patches, wrapper

# Index of the host, in place of a device's.
_HOST = -1
_Hook = Callable[[Any, Any], Any]


@dataclass
class _Reduction:
    """The reduction of a reducer's buckets: by a hook of the job, with its state, or an
    all-reduce in place."""

    group: Any
    collectives: Collectives
    hook: _Hook | None = None
    state: Any = None


def patch_data_parallel(patches: Patches, collectives: Collectives) -> None:
    """Give every reducer a communication hook until `patches.undo()`: its own reduction
    needs real works."""
    reductions: weakref.WeakKeyDictionary[Any, _Reduction] = weakref.WeakKeyDictionary()
    register = dist._register_comm_hook

    @wrapper
    def wrap_init(
        original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any
    ) -> Any:
        result = original(model, *args, **kwargs)
        reductions[model.reducer] = reduction = _Reduction(
            model.process_group, collectives
        )
        register(model.reducer, reduction, _reduce)
        return result

    def register_hook(reducer: Any, state: Any, hook: _Hook) -> None:
        reductions[reducer].hook, reductions[reducer].state = hook, state

    def register_builtin_hook(reducer: Any, kind: Any) -> None:
        compresses = kind == dist.BuiltinCommHookType.FP16_COMPRESS
        register_hook(
            reducer,
            reductions[reducer].group,
            fp16_compress_hook if compresses else allreduce_hook,
        )

    patches.wrap(DistributedDataParallel, "_ddp_init_helper", wrap_init)
    # Its statistics need a timer of CUDA.
    patches.set(dist.Logger, "set_runtime_stats_and_log", lambda _logger: None)
    patches.set(dist, "_register_comm_hook", register_hook)
    patches.set(dist, "_register_builtin_comm_hook", register_builtin_hook)


def _reduce(state: _Reduction, bucket: dist.GradBucket) -> torch.futures.Future[Any]:
    """Reduce a bucket, and let the end of the backward wait for it."""
    torch.autograd.Variable._execution_engine.queue_callback(
        state.collectives.wait_for_all
    )
    if state.hook is not None:
        return state.hook(state.state, bucket)
    buffer = bucket.buffer()
    dist.all_reduce(buffer, group=state.group, async_op=True)
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(buffer)
    return future


def patch_replicas(patches: Patches) -> None:
    """Let `torch.nn.DataParallel` share a batch among the devices of the process, until
    `patches.undo()`."""

    def scatter(
        tensor: Any, devices: list[int], sizes: Any, dim: int, _streams: Any
    ) -> list[Any]:
        parts = tensor.split(sizes, dim) if sizes else tensor.chunk(len(devices), dim)
        return [
            part.to(f"cuda:{device}")
            for part, device in zip(parts, devices, strict=False)
        ]

    def broadcast(tensors: list[Any], devices: list[int], _size: int) -> list[Any]:
        copies = ([each.to(f"cuda:{one}") for each in tensors] for one in devices[1:])
        return [tensors, *copies]

    def gather(tensors: list[Any], dim: int, device: int | None) -> Any:
        target = "cpu" if device == _HOST else f"cuda:{device or 0}"
        return torch.cat([tensor.to(target) for tensor in tensors], dim)

    patches.set(torch._C, "_scatter", scatter)
    patches.set(torch._C, "_broadcast_coalesced", broadcast)
    patches.set(torch._C, "_gather", gather)


def patch_model_parallel(
    patches: Patches, mode: FakeDeviceMode, peers: Peers | None
) -> None:
    """Adapt DTensor and torch.distributed.pipelining, once the job has imported them,
    until `patches.undo()`; `peers`: ranks that are run, whose stages send what they
    have."""
    propagation = functools.partial(_patch_propagation, patches, mode)
    patches.when_imported("torch.distributed.tensor._sharding_prop", propagation)
    patches.when_imported(
        "torch.distributed.pipelining.stage",
        functools.partial(_patch_stages, patches, peers),
    )


def _patch_propagation(patches: Patches, mode: FakeDeviceMode, module: Any) -> None:
    """Let DTensor find the layouts of results on tensors of its own, of full size,
    which are not of the job."""

    @wrapper
    def wrap(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before, mode.enabled = mode.enabled, False
        try:
            return original(*args, **kwargs)
        finally:
            mode.enabled = before

    patches.set(module, "FakeTensorMode", HostlessFakeMode)
    patches.wrap(module.ShardingPropagator, "_propagate_tensor_meta_non_cached", wrap)


def _if_alone(function: Callable[..., Any], peers: Peers | None) -> Any:
    """Return a wrapper of a method of stages that calls another function where the
    other stages are not run."""

    @wrapper
    def wrap(
        original: Callable[..., Any], stage: Any, *args: Any, **kwargs: Any
    ) -> Any:
        ranks = dist.get_process_group_ranks(stage.group)
        if peers is not None and peers.meet(ranks):
            return original(stage, *args, **kwargs)
        return function(stage, *args, **kwargs)

    return wrap


def _patch_stages(patches: Patches, peers: Peers | None, module: Any) -> None:
    """Let stages take what others would send if these are not run: gradients as this
    stage's outputs, inputs as a stage's outputs."""
    sent: list[Any] = []

    def send(_stage: Any, content: Any, _target: int) -> None:
        if isinstance(content, module._StageForwardMeta):
            sent[:] = [content]

    def receive(stage: Any, source: int) -> Any:
        if source > stage.stage_index:
            return module._StageBackwardMeta(
                backward_metas=module._derive_grad_metas(stage._stage_meta.outputs)
            )
        return sent[0]

    votes: list[Any] = []

    @wrapper
    def wrap_vote(
        original: Callable[..., Any], stage: Any, *args: Any, **kwargs: Any
    ) -> Any:
        result = original(stage, *args, **kwargs)
        if stage.is_first:
            votes[:] = [result]
        return result

    patches.wrap(module.PipelineStage, "_warmup_forward_vote", wrap_vote)
    # Whether shapes are stated or must be inferred: all stages agree with the first
    # one.
    substitutes: dict[str, Callable[..., Any]] = {
        "_warmup_backward_result": lambda *_stage, **_received: votes[0],
        "_send_meta": send,
        "_recv_meta": receive,
    }
    for name, function in substitutes.items():
        patches.wrap(module.PipelineStage, name, _if_alone(function, peers))
