"""Hands gradients to the engine: all at the step, or each as soon as a backward has
computed it."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ebbtide.interleave.engine.devices.device import Device
from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.numerics.norm import total
from ebbtide.interleave.engine.params.early_copies import EarlyCopies, first_params
from ebbtide.interleave.engine.params.exchange import Exchange
from ebbtide.interleave.engine.params.local_shards import (
    flat_like,
    local_shard,
    unflatten,
    wrap_shard,
)
from ebbtide.interleave.engine.params.step_calls import StepCalls
from ebbtide.interleave.engine.rules.rule import Scalars
from ebbtide.interleave.engine.runtime.engine import Engine

# The same as in torch.nn.utils.clip_grad_norm_.
_EPS = 1e-6


class GradientNorm:
    """Adds up the squares of a step's gradients on all ranks, and returns the factor
    that scales and clips them."""

    def __init__(
        self, device: Device, exchange: Exchange, max_norm: float | None
    ) -> None:
        self._device = device
        self._exchange = exchange
        self._max_norm = max_norm
        # The indices of parameters, and the function that waits for the sums of squares
        # of their gradients.
        self._pending: list[tuple[Sequence[int], Callable[[], list[float]]]] = []

    def add_all(self, gradients: Mapping[int, torch.Tensor]) -> None:
        """Add gradients, by index, with the values that they have now.

        This is work of the calling thread, which computed them: memory that it frees,
        or writes later, holds them long enough."""
        if gradients:
            self._pending.append(
                (
                    list(gradients),
                    self._device.sums_of_squares(list(gradients.values())),
                )
            )

    def clear(self) -> None:
        """Drop all gradients that were added."""
        self._pending.clear()

    def scale_factor(
        self, params: Sequence[torch.Tensor], loss_scale: float = 1.0
    ) -> float | None:
        """Return the factor to multiply each gradient with, None if one is not finite.

        Drop the gradients that were added. `loss_scale` is the factor that they were
        multiplied with before.
        """
        sums: dict[int, float] = {}
        # From the last to the first: when the last are there, there is nothing to wait
        # for in the others.
        for indices, wait in reversed(self._pending):
            for index, value in zip(indices, wait(), strict=True):
                # One that was added again, after an interrupt, has its last values.
                sums.setdefault(index, value)
        self.clear()
        whole = self._exchange.add(sums)
        others = {
            param: sums.get(index, 0.0)
            for index, param in enumerate(params)
            if index not in whole
        }
        norm = math.sqrt(_sum_over_ranks(others, whole.values())) / loss_scale
        if not math.isfinite(norm):
            return None
        clip_factor = (
            min(1.0, self._max_norm / (norm + _EPS))
            if self._max_norm is not None
            else 1.0
        )
        return clip_factor / loss_scale


def _sum_over_ranks(
    squares: Mapping[torch.Tensor, float], whole: Iterable[float]
) -> float:
    """Return the sum over all gradients and shards, and complete sums of others, with
    the same bits on every rank.

    All ranks must call this."""
    sums = list(whole)
    sharded: dict[Any, list[float]] = {}
    for param, square in squares.items():
        if hasattr(param, "to_local"):
            sharded.setdefault((param.device_mesh, param.placements), []).append(square)
        else:
            sums.append(square)
    for (mesh, placements), shard_squares in sharded.items():
        shard_sum = total(shard_squares)
        for dimension, placement in enumerate(placements):
            if placement.is_shard():
                shard_sum = _sum_over_group(
                    shard_sum, mesh.get_group(dimension), mesh.device_type
                )
        sums.append(shard_sum)
    return total(sums)


def _sum_over_group(value: float, group: Any, device: str) -> float:
    own_value = torch.tensor([value], dtype=torch.float64, device=device)
    values = [
        torch.empty_like(own_value)
        for _ in range(torch.distributed.get_world_size(group))
    ]
    torch.distributed.all_gather(values, own_value, group=group)
    # One copy to the host for all ranks.
    return total(torch.cat(values).tolist())


_aten = torch.ops.aten
# Operations that return the same tensor; DTensor applies them when it wraps a local
# tensor.
_ALIASES = (_aten.view.default, _aten.detach.default, _aten.alias.default)
# Autograd adds a gradient to the existing one, FSDP2 does so in place.
_ADDITIONS = (_aten.add.Tensor, _aten.add_.Tensor)


class GradientCollector:
    """Collects the gradients of parameters for an engine.

    It collects over as many backwards as the step before had. Copied gradients stay in
    `p.grad`, and their copies begin when they are computed for the last time (see
    EarlyCopies). Streamed gradients are offloaded when they are computed for the last
    time, and `p.grad` is a placeholder.
    If a job sets that to None, or runs one more backward, they are recalled and
    submitted at the step. `expected_scalars` returns the factors of a step that is
    neither clipped nor skipped. The gradients of an exchange are gathered at the step.
    """

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        exchange: Exchange,
        engine: Engine,
        norm: GradientNorm,
        kind: str,
        calls: StepCalls,
        expected_scalars: Callable[[], Sequence[Scalars | None] | None],
    ) -> None:
        self._params = params
        self._exchange = exchange
        self._engine = engine
        self._norm = norm
        self._streamed = kind == "streamed"
        self._calls = calls
        self._expected_scalars = expected_scalars
        # The placeholders in p.grad of the offloaded gradients, by the parameter's
        # index.
        self._placeholders: dict[int, torch.Tensor] = {}
        self._sizes = [local_shard(param).numel() for param in params]
        watched = {index for index, one in enumerate(params) if one.requires_grad}
        if not (self._streamed or calls.has_hooks):
            trained = [
                size * (index in watched) for index, size in enumerate(self._sizes)
            ]
            self._sizes = _thinned(trained)
            last = first_params(engine) if kind == "copied" else set()
            watched = {one for one in watched if self._sizes[one] or one in last}
        self._copies = EarlyCopies(params, engine, watched)
        # A rank may have only empty shards.
        self._total_size = max(1, sum(self._sizes))
        # How often each gradient was computed in this step, and in the one before.
        self._times, self._expected_times = [0] * len(params), [0] * len(params)
        self._ready_size = 0
        weak_self = weakref.ref(self)
        self._handles = [
            params[index].register_post_accumulate_grad_hook(
                _make_hook(weak_self, index)
            )
            for index in sorted(watched)
        ]

    def collect(self) -> dict[int, torch.Tensor]:
        """Return the gradients that were not offloaded, flat, by the parameter's
        index."""
        self._calls.finish_updates()
        engine = self._engine
        if not (
            engine.is_running and all(map(self._is_unchanged, engine.update.offloaded))
        ):
            self.recall()
        return {
            index: _flat_gradient(param)
            for index, param in enumerate(self._params)
            if param.grad is not None and index not in engine.update.offloaded
        }

    def recall(self) -> None:
        """Put offloaded gradients back into `p.grad`, and stop the plan.

        What was added to them since is included.
        """
        self._calls.finish_updates()
        gradients = self._engine.recall_gradients(
            [local_shard(param).detach() for param in self._params]
        )
        for index, gradient in gradients.items():
            param, placeholder = self._params[index], self._placeholders.get(index)
            # After an interrupt there may be none: p.grad is still the gradient.
            if placeholder is not None and param.grad is placeholder:
                for added in local_shard(placeholder).added:
                    gradient += flat_like(local_shard(added), param)
                param.grad = wrap_shard(param, unflatten(gradient, param))
        self._placeholders.clear()
        self._norm.clear()

    def end_step(self) -> None:
        """Expect as many gradients of each parameter as this step had.

        The step was done or skipped.
        """
        for placeholder in self._placeholders.values():
            # Nothing can be added to it from now on.
            local_shard(placeholder).used.append(True)
        self._placeholders.clear()
        self._expected_times, self._times, self._ready_size = (
            self._times,
            [0] * len(self._times),
            0,
        )
        self._copies.begin()

    def close(self) -> None:
        """Stop watching backwards."""
        for handle in self._handles:
            handle.remove()

    def _is_unchanged(self, index: int) -> bool:
        """Return whether nobody set an offloaded gradient to None or added to it."""
        placeholder = self._placeholders.get(index)
        is_placed = placeholder is not None and self._params[index].grad is placeholder
        return is_placed and not local_shard(placeholder).added

    def _count_gradient(self, index: int) -> None:
        """Count a gradient that a backward has computed. What this raises, the backward
        raises."""
        self._calls.check_gradient(index)
        self._times[index] += 1
        if self._times[index] == self._expected_times[index]:
            self._ready_size += self._sizes[index]
            self._on_ready(index, self._ready_size / self._total_size)

    def _on_ready(self, index: int, ready_share: float) -> None:
        """Offload a gradient that was computed for the last time in this step.

        Report the share that is ready.
        """
        engine, param = self._engine, self._params[index]
        if engine.device.is_capturing():
            # The gradients are computed when the graph is replayed, and are submitted
            # at the step.
            return
        self._calls.finish_updates()
        # None: the optimizer is gone.
        if (
            engine.needs_assumption
            and (expected := self._expected_scalars()) is not None
        ):
            engine.assume(expected)
        is_offloaded = (
            index in self._exchange.owners or index in engine.update.offloaded
        )
        if self._streamed and engine.is_running and not is_offloaded:
            gradient = _flat_gradient(param)
            self._norm.add_all({index: gradient})
            engine.offload_gradient(index, gradient)
            placeholder = wrap_shard(
                param, GradientPlaceholder(local_shard(param).detach())
            )
            self._placeholders[index] = param.grad = placeholder
        self._copies.gradient_ready(index)
        engine.report_progress(ready_share)


# Gradients that stay in `p.grad` only show how far the backward is.
_PROGRESS_POINTS = 24


def _thinned(sizes: Sequence[int]) -> list[int]:
    """Return sizes of which few are not 0, with the same sum.

    Each of these has the sum of those before it that are 0 now.
    """
    step = max(1, sum(sizes) // _PROGRESS_POINTS)
    thinned, collected = [0] * len(sizes), 0
    for index, size in enumerate(sizes):
        collected += size
        if collected >= step or index == len(sizes) - 1:
            thinned[index], collected = collected, 0
    return thinned


def _make_hook(
    collector_ref: weakref.ref[GradientCollector], index: int
) -> Callable[[torch.Tensor], None]:
    def hook(_: torch.Tensor) -> None:
        collector = collector_ref()
        if collector is not None:
            collector._count_gradient(index)

    # torch.compile cannot trace it.
    untraced: Callable[[torch.Tensor], None] = torch._disable_dynamo(hook)
    return untraced


def _flat_gradient(param: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a parameter, flat, in the order of the parameter's memory.
    Raises EngineError if it is sparse or has another dtype than the parameter."""
    assert param.grad is not None
    gradient = local_shard(param.grad).detach()
    dtype = local_shard(param).dtype
    if gradient.is_sparse or gradient.dtype != dtype:
        kind = "sparse" if gradient.is_sparse else str(gradient.dtype)
        raise EngineError(
            f"a gradient is {kind} and its parameter {dtype}: it must be dense, of the "
            "same dtype"
        )
    return flat_like(gradient, param)


class GradientPlaceholder(torch.Tensor):  # type: ignore[misc]
    """The `p.grad` of an offloaded gradient.

    Computing with it raises EngineError, and what a backward adds to it is stored. It
    intercepts operations, not function calls, since placeholders are also inside
    DTensors.
    """

    added: list[torch.Tensor]
    used: list[bool]

    @staticmethod
    def __new__(cls, tensor: torch.Tensor) -> GradientPlaceholder:
        placeholder: GradientPlaceholder = torch.Tensor._make_wrapper_subclass(
            cls,
            tensor.shape,
            strides=tensor.stride(),
            dtype=tensor.dtype,
            device=tensor.device,
        )
        placeholder.added, placeholder.used = [], []
        return placeholder

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls,
        function: Any,
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if function in _ALIASES:
            alias = GradientPlaceholder(args[0])
            alias.added, alias.used = args[0].added, args[0].used
            return alias
        if (
            function in _ADDITIONS
            and isinstance(args[0], GradientPlaceholder)
            and not kwargs
        ):
            if args[0].used:
                raise EngineError(
                    "a gradient of the previous step is still in p.grad: call "
                    "zero_grad() after step()"
                )
            args[0].added.append(args[1].detach().clone())
            return args[0]
        raise EngineError(
            "streamed gradients are copied to the host as soon as they are computed: "
            "let the optimizer clip "
            "(max_grad_norm=) and scale (loss_scale=, and optimizer.scale(loss)) in "
            "place of GradScaler, "
            "let zero_grad() set them to None, or use gradients='kept'"
        )

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"GradientPlaceholder(shape={tuple(self.shape)})"
