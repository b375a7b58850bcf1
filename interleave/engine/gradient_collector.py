"""Hands gradients to the engine: all at the step, or each as soon as a backward has computed it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ebbtide.interleave.engine.backward_progress import BackwardProgress
from ebbtide.interleave.engine.checks import flat_gradient
from ebbtide.interleave.engine.gradient_norm import GradientNorm
from ebbtide.interleave.engine.gradient_placeholder import added_gradients, make_placeholder, mark_used
from ebbtide.interleave.engine.local_shards import flat_like, local_shard, unflatten, wrap_shard
from ebbtide.interleave.engine.numerics.reference import Scalars
from ebbtide.interleave.engine.pending_params import PendingParams
from ebbtide.interleave.engine.runtime.engine import Engine


class GradientCollector:
    """Collects the gradients of parameters for an engine.

    With streamed gradients, each gradient is offloaded when it is computed for the last time in a step, and `p.grad`
    is a placeholder that only has its shape. A job may set that to None, or run one more backward: then the gradients
    are recalled, without the dropped ones and with what was added, and are submitted at the step.

    Args:
        params: The parameters.
        engine: The engine that updates them.
        norm: Receives every gradient that is offloaded.
        streamed: Whether gradients are offloaded as soon as they are computed.
        pending: Waits for late operations of the step before.
        expected_scalars: Returns the factors by parameter that the next step has if it is neither clipped nor skipped.
            None: speculative updates wait for the step.
    """

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        engine: Engine,
        norm: GradientNorm,
        streamed: bool,
        pending: PendingParams,
        expected_scalars: Callable[[], Sequence[Scalars | None]] | None = None,
    ) -> None:
        self._params = params
        self._engine = engine
        self._norm = norm
        self._streamed = streamed
        self._pending = pending
        self._expected_scalars = expected_scalars
        # The placeholders in p.grad of the offloaded gradients, by the parameter's index.
        self._placeholders: dict[int, torch.Tensor] = {}
        self._progress = BackwardProgress(params, pending.check_gradient, self._on_ready)

    def collect(self) -> dict[int, torch.Tensor]:
        """Return the gradients that were not offloaded, flat, by the parameter's index."""
        self._pending.finish_updates()
        engine = self._engine
        if not (engine.is_running and all(map(self._is_unchanged, engine.offloaded_params))):
            self.recall()
        return {
            index: flat_gradient(param)
            for index, param in enumerate(self._params)
            if param.grad is not None and index not in engine.offloaded_params
        }

    def recall(self) -> None:
        """Put offloaded gradients back into `p.grad`, with what was added to them since, and stop the plan."""
        self._pending.finish_updates()
        gradients = self._engine.recall_gradients([local_shard(param).detach() for param in self._params])
        for index, gradient in gradients.items():
            param, placeholder = self._params[index], self._placeholders.get(index)
            # After an interrupt there may be none: p.grad is still the gradient.
            if placeholder is not None and param.grad is placeholder:
                for added in added_gradients(placeholder):
                    gradient += flat_like(local_shard(added), param)
                param.grad = wrap_shard(param, unflatten(gradient, param))
        self._placeholders.clear()
        self._norm.clear()

    def end_step(self) -> None:
        """Prepare for the next step, after a step that was done or skipped."""
        for placeholder in self._placeholders.values():
            mark_used(placeholder)
        self._placeholders.clear()
        self._progress.end_step()

    def close(self) -> None:
        """Stop watching backwards."""
        self._progress.remove_hooks()

    def _is_unchanged(self, index: int) -> bool:
        """Return whether nobody has set an offloaded gradient to None or added to it."""
        placeholder = self._placeholders.get(index)
        is_placed = placeholder is not None and self._params[index].grad is placeholder
        return is_placed and not added_gradients(placeholder)

    def _on_ready(self, index: int, ready_share: float) -> None:
        """Offload a gradient that the backward has computed for the last time in this step (see BackwardProgress)."""
        engine, param = self._engine, self._params[index]
        if engine.device.is_capturing():
            # The gradients are computed when the graph is replayed, and are submitted at the step.
            return
        self._pending.finish_updates()
        if self._expected_scalars is not None and engine.needs_assumption:
            engine.assume(self._expected_scalars())
        if self._streamed and engine.is_running and index not in engine.offloaded_params:
            gradient = flat_gradient(param)
            self._norm.add_all({index: gradient})
            engine.offload_gradient(index, gradient)
            self._placeholders[index] = param.grad = make_placeholder(param)
        engine.report_progress(ready_share)
