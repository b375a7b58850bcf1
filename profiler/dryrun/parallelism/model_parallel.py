"""Runs torch's own tensor and pipeline parallelism in a dry run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ebbtide.profiler.agent.imports import when_imported
from ebbtide.profiler.agent.patches import Patches
from ebbtide.profiler.dryrun.fake_device import FakeDeviceMode, HostlessFakeMode


class ModelParallelPatches:
    """Patches of DTensor and of torch.distributed.pipelining, once the job has imported them, until `remove`.

    Args:
        patches: The replacements.
        mode: The mode that fakes operations.
    """

    def __init__(self, patches: Patches, mode: FakeDeviceMode) -> None:
        self._patches, self._mode = patches, mode
        self._cancel_callbacks = [
            when_imported("torch.distributed.tensor._sharding_prop", self._patch_propagation),
            when_imported("torch.distributed.pipelining.stage", self._patch_stages),
        ]

    def remove(self) -> None:
        """Wait for no imports any more."""
        for cancel in self._cancel_callbacks:
            cancel()

    def _patch_propagation(self, module: Any) -> None:
        """Let DTensor find the layouts of results on tensors of its own, of full size, which are not of the job."""
        mode = self._mode

        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def propagate(*args: Any, **kwargs: Any) -> Any:
                before, mode.enabled = mode.enabled, False
                try:
                    return original(*args, **kwargs)
                finally:
                    mode.enabled = before

            return propagate

        self._patches.set(module, "FakeTensorMode", HostlessFakeMode)
        self._patches.wrap(module.ShardingPropagator, "_propagate_tensor_meta_non_cached", wrap)

    def _patch_stages(self, module: Any) -> None:
        """Let stages take what others would send: gradients as this stage's outputs, inputs as a stage's outputs."""
        sent: list[Any] = []

        def send(_stage: Any, content: Any, _target: int) -> None:
            if isinstance(content, module._StageForwardMeta):
                sent[:] = [content]

        def receive(stage: Any, source: int) -> Any:
            if source > stage.stage_index:
                return module._StageBackwardMeta(backward_metas=module._derive_grad_metas(stage._stage_meta.outputs))
            return sent[0]

        votes: list[Any] = []

        def wrap_vote(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def vote(stage: Any, *args: Any, **kwargs: Any) -> Any:
                result = original(stage, *args, **kwargs)
                if stage.is_first:
                    votes[:] = [result]
                return result

            return vote

        self._patches.wrap(module.PipelineStage, "_warmup_forward_vote", wrap_vote)
        # Whether shapes are stated or must be inferred: all stages agree with the first one.
        self._patches.set(module.PipelineStage, "_warmup_backward_result", lambda *_stage, **_received: votes[0])
        self._patches.set(module.PipelineStage, "_send_meta", send)
        self._patches.set(module.PipelineStage, "_recv_meta", receive)
