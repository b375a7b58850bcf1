"""Records gradient reduction over ranks and gradient copies to host memory, mostly in a backward."""

from __future__ import annotations

import functools
import time
from typing import Any, Callable

from ..recorder import Recorder
from ..zero_optimizer import offloads_state
from .substeps import SubstepRecorder

# The reduction of an empty bucket takes less.
_SHORT_NS = 10_000

Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]


class GradientReduction:
    """Records the operations `reduce` and, inside it, `gradient down`; inside a recorded update they are its sub-steps.

    Attributes:
        stage_3: Wrappers by the name of the method of the stage 3 optimizer that they wrap.
        stage_1_and_2: The same for the optimizer of stages 1 and 2.
    """

    def __init__(self, recorder: Recorder, substeps: SubstepRecorder, torch: Any) -> None:
        self._recorder = recorder
        self._substeps = substeps
        self._compiling = torch.compiler.is_compiling  # a compiled backward
        self._reduce_sequence: int | None = None  # the sequence number of the reduction that runs
        self.stage_3: dict[str, Wrapper] = {
            "partition_grads": functools.partial(self._wrap_copy, count_bytes=_stage_3_bytes),
            "_offload_grad_partition_at_boundary": functools.partial(
                self._wrap_copy, count_bytes=_stage_3_boundary_bytes
            ),
        }
        self.stage_1_and_2: dict[str, Wrapper] = {
            "async_accumulate_grad_in_cpu_via_gpu": functools.partial(self._wrap_copy, count_bytes=_accumulated_bytes),
            "async_inplace_copy_grad_to_fp32_buffer_from_gpu": functools.partial(
                self._wrap_copy, count_bytes=_final_bytes
            ),
            "copy_grads_in_partition": functools.partial(self._wrap_copy, count_bytes=_compact_bytes),
        }
        self._copying = False

    @property
    def sequence(self) -> int | None:
        """The sequence number of the reduction that runs; None outside of one."""
        return self._reduce_sequence

    def wrap_reduce(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the method that reduces a bucket of gradients."""
        recorder, substeps = self._recorder, self._substeps

        @functools.wraps(original)
        def reduce(*args: Any, **kwargs: Any) -> Any:
            if self._compiling() or not recorder.recording or self._reduce_sequence is not None:
                return original(*args, **kwargs)
            if substeps.running:
                substeps.switch("reduce")
            self._reduce_sequence = sequence = substeps.sequence or recorder.next_sequence()
            start_ns = time.monotonic_ns()
            try:
                return original(*args, **kwargs)
            finally:
                end_ns = time.monotonic_ns()
                self._reduce_sequence = None
                if substeps.running:
                    substeps.switch("rest")
                elif end_ns - start_ns > _SHORT_NS:
                    recorder.put_op(sequence, "reduce", "host", start_ns, end_ns)

        return reduce

    def _wrap_copy(self, original: Callable[..., Any], count_bytes: Callable[..., int | None]) -> Callable[..., Any]:
        """Wrap a method that copies gradients to host memory.

        Args:
            original: The method.
            count_bytes: Called before it with its arguments; returns the bytes it copies, None if it copies nothing.
        """
        recorder, substeps = self._recorder, self._substeps

        @functools.wraps(original)
        def copy(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            nbytes = None
            if not self._compiling() and recorder.recording and not self._copying:
                nbytes = _copied_bytes(count_bytes, optimizer, args)
            if nbytes is None:
                return original(optimizer, *args, **kwargs)
            is_substep = substeps.running and self._reduce_sequence is None
            if is_substep:
                substeps.switch("gradient down", nbytes=nbytes)
            self._copying = True
            start_ns = time.monotonic_ns()
            try:
                return original(optimizer, *args, **kwargs)
            finally:
                self._copying = False
                if is_substep:
                    substeps.switch("rest")
                else:
                    end_ns = time.monotonic_ns()
                    sequence, parent = recorder.next_sequence(), self._reduce_sequence
                    recorder.put_op(sequence, "gradient down", "host", start_ns, end_ns, None, nbytes, parent=parent)

        return copy


def _copied_bytes(count_bytes: Callable[..., int | None], optimizer: Any, args: Any) -> int | None:
    """Return the bytes that a call copies to host memory; None if none, or if this DeepSpeed version hides them."""
    if not offloads_state(optimizer):
        return None
    try:
        return count_bytes(optimizer, *args)
    except Exception:
        return None


def _stage_3_bytes(optimizer: Any, parameters: Any, gradients: Any) -> int | None:
    """Stage 3: each partition goes into a buffer on the host, and at the boundary into the fp32 gradient too."""
    elements = [gradient.numel() for gradient in gradients]
    buffer = optimizer.grad_partitions_flat_buffer
    nbytes = sum(elements) * buffer.element_size() if buffer.device.type == "cpu" else 0
    # ebbtide's own engine takes the gradient from there, and records its copies itself.
    if optimizer.is_gradient_accumulation_boundary() and not hasattr(optimizer, "ebbtide_policy"):
        nbytes += sum(_stage_3_boundary_bytes(optimizer, p, g) or 0 for p, g in zip(parameters, gradients))
    return nbytes or None


def _stage_3_boundary_bytes(optimizer: Any, parameter: Any, gradient: Any, *_: Any) -> int | None:
    """Stage 3, at the boundary: one parameter's part of the fp32 gradient, if that is in host memory."""
    subgroup = optimizer.grad_position[optimizer.get_param_id(parameter)][0]
    master = optimizer.fp32_partitioned_groups_flat[subgroup]
    if master.device.type != "cpu":
        return None
    return int(gradient.numel() * optimizer.master_weights_and_grads_dtype.itemsize)


def _accumulated_bytes(optimizer: Any, parameter: Any) -> int:
    """Stages 1 and 2, before the boundary: the whole gradient in the model's precision."""
    return int(parameter.numel() * parameter.element_size())


def _final_bytes(optimizer: Any, parameter: Any) -> int:
    """Stages 1 and 2, at the boundary: this rank's part of the gradient in fp32."""
    elements = optimizer.grad_position[optimizer.get_param_id(parameter)][3]
    return int(elements * optimizer.master_weights_and_grads_dtype.itemsize)


def _compact_bytes(optimizer: Any, parameter: Any, group: int | None = None) -> int | None:
    """Stages 1 and 2 with gradients that are accumulated in fp32 on the device."""
    index = optimizer._get_param_group_idx(parameter) if group is None else group
    compact = optimizer.is_gradient_accumulation_boundary() and optimizer._use_compact_grad_partition_buffer(index)
    return _final_bytes(optimizer, parameter) if compact else None
