"""Gradients on their way: reduced over ranks, and copied to host memory, mostly in a backward."""

from __future__ import annotations

import functools
import time
from typing import Any, Callable

from ..recorder import Recorder
from ..zero_optimizer import offloads
from .substeps import SubSteps

# A bucket that was empty takes less.
_SHORT_NS = 10_000

Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]


class Reduction:
    """Records `reduce` and, inside it, `gradient down`; where an update is followed they are steps of it.

    stage_3, stage_1_and_2: by name of a ZeRO optimizer's method, what wraps it.
    """

    def __init__(self, recorder: Recorder, steps: SubSteps, torch: Any) -> None:
        self._recorder = recorder
        self._steps = steps
        self._compiling = torch.compiler.is_compiling  # a compiled backward
        self._reducing: int | None = None  # the sequence number of the row that runs
        self.stage_3: dict[str, Wrapper] = {
            "partition_grads": functools.partial(self._down, nbytes=_partitions),
            "_offload_grad_partition_at_boundary": functools.partial(self._down, nbytes=_partition),
        }
        self.stage_1_and_2: dict[str, Wrapper] = {
            "async_accumulate_grad_in_cpu_via_gpu": functools.partial(self._down, nbytes=_accumulated),
            "async_inplace_copy_grad_to_fp32_buffer_from_gpu": functools.partial(self._down, nbytes=_final),
            "copy_grads_in_partition": functools.partial(self._down, nbytes=_compact),
        }
        self._copying = False

    def reduce(self, original: Callable[..., Any]) -> Callable[..., Any]:
        recorder, steps = self._recorder, self._steps

        @functools.wraps(original)
        def reduce(*args: Any, **kwargs: Any) -> Any:
            if self._compiling() or not recorder.recording or self._reducing is not None:
                return original(*args, **kwargs)
            if steps.running:
                steps.switch("reduce")
            self._reducing = sequence = steps.sequence or recorder.number()
            start_ns = time.monotonic_ns()
            try:
                return original(*args, **kwargs)
            finally:
                now = time.monotonic_ns()
                self._reducing = None
                if steps.running:
                    steps.switch("rest")
                elif now - start_ns > _SHORT_NS:
                    recorder.row(sequence, "reduce", "host", start_ns, now)

        return reduce

    def _down(self, original: Callable[..., Any], nbytes: Callable[..., int | None]) -> Callable[..., Any]:
        """nbytes: what a call copies down; None: it copies nothing. Asked before the call."""
        recorder, steps = self._recorder, self._steps

        @functools.wraps(original)
        def down(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            size = None
            if not self._compiling() and recorder.recording and not self._copying:
                size = _asked(nbytes, optimizer, args)
            if size is None:
                return original(optimizer, *args, **kwargs)
            alone = steps.running and self._reducing is None
            if alone:
                steps.switch("gradient down", nbytes=size)
            self._copying = True
            start_ns = time.monotonic_ns()
            try:
                return original(optimizer, *args, **kwargs)
            finally:
                self._copying = False
                if alone:
                    steps.switch("rest")
                else:
                    now = time.monotonic_ns()
                    number = recorder.number()
                    recorder.row(number, "gradient down", "host", start_ns, now, None, size, parent=self._reducing)

        return down


def _asked(nbytes: Callable[..., int | None], optimizer: Any, args: Any) -> int | None:
    """None as well where this version of DeepSpeed does not tell."""
    if not offloads(optimizer):
        return None
    try:
        return nbytes(optimizer, *args)
    except Exception:
        return None


def _partitions(optimizer: Any, parameters: Any, gradients: Any) -> int | None:
    """Stage 3: each partition goes into a buffer on the host, and at the boundary into the fp32 gradient too."""
    elements = [gradient.numel() for gradient in gradients]
    buffer = optimizer.grad_partitions_flat_buffer
    size = sum(elements) * buffer.element_size() if buffer.device.type == "cpu" else 0
    # Our own engine takes the gradient from there, and tells of its copies itself.
    if optimizer.is_gradient_accumulation_boundary() and not hasattr(optimizer, "ebbtide_policy"):
        size += sum(_partition(optimizer, p, g) or 0 for p, g in zip(parameters, gradients))
    return size or None


def _partition(optimizer: Any, parameter: Any, gradient: Any, *_: Any) -> int | None:
    """Stage 3, at the boundary: one parameter's part of the fp32 gradient, where that lies on the host."""
    subgroup = optimizer.grad_position[optimizer.get_param_id(parameter)][0]
    master = optimizer.fp32_partitioned_groups_flat[subgroup]
    if master.device.type != "cpu":
        return None
    return int(gradient.numel() * optimizer.master_weights_and_grads_dtype.itemsize)


def _accumulated(optimizer: Any, parameter: Any) -> int:
    """Stages 1 and 2, before the boundary: the whole gradient in the model's precision."""
    return int(parameter.numel() * parameter.element_size())


def _final(optimizer: Any, parameter: Any) -> int:
    """Stages 1 and 2, at the boundary: this rank's part of the gradient in fp32."""
    elements = optimizer.grad_position[optimizer.get_param_id(parameter)][3]
    return int(elements * optimizer.master_weights_and_grads_dtype.itemsize)


def _compact(optimizer: Any, parameter: Any, group: int | None = None) -> int | None:
    """Stages 1 and 2 with gradients that are accumulated in fp32 on the device."""
    index = optimizer._get_param_group_idx(parameter) if group is None else group
    compact = optimizer.is_gradient_accumulation_boundary() and optimizer._use_compact_grad_partition_buffer(index)
    return _final(optimizer, parameter) if compact else None
