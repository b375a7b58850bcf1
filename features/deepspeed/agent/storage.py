"""Records what ZeRO-Infinity reads from and writes to storage.

Also how long the job waits for that.
"""

from __future__ import annotations

import functools
import re
import time
from typing import Any, Callable, NamedTuple

from ebbtide.profiler.agent.patches import Patches, Wrapper, wrapper
from ebbtide.profiler.agent.recorder import Recorder

from .zero_optimizer import offloads_state
from .zero_substeps import SubstepRecorder

# The reduction of an empty bucket takes less.
_SHORT_NS = 10_000

_CountBytes = Callable[..., "int | None"]


class GradientReduction:
    """Records `reduce` and, inside it, `gradient down`.

    Inside a recorded update they are its sub-steps.

    `stage_3`, `stage_1_and_2`: wrappers by the name of the method of these stages'
    optimizer that they wrap."""

    def __init__(
        self, recorder: Recorder, substeps: SubstepRecorder, torch: Any
    ) -> None:
        self._recorder = recorder
        self._substeps = substeps
        self._compiling = torch.compiler.is_compiling  # a compiled backward
        # the sequence number of the reduction that runs; None outside of one
        self.sequence: int | None = None
        self.stage_3: dict[str, Wrapper] = {
            "partition_grads": functools.partial(self._wrap_copy, _stage_3_bytes),
            "_offload_grad_partition_at_boundary": functools.partial(
                self._wrap_copy, _stage_3_boundary_bytes
            ),
        }
        self.stage_1_and_2: dict[str, Wrapper] = {
            "async_accumulate_grad_in_cpu_via_gpu": functools.partial(
                self._wrap_copy, _accumulated_bytes
            ),
            "async_inplace_copy_grad_to_fp32_buffer_from_gpu": functools.partial(
                self._wrap_copy, _final_bytes
            ),
            "copy_grads_in_partition": functools.partial(
                self._wrap_copy, _compact_bytes
            ),
        }
        self._copying = False

    @wrapper
    def wrap_reduce(
        self, original: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Wrap the method that reduces a bucket of gradients."""
        recorder, substeps = self._recorder, self._substeps
        if self._compiling() or not recorder.recording or self.sequence is not None:
            return original(*args, **kwargs)
        if substeps.running:
            substeps.switch("reduce")
        self.sequence = sequence = substeps.sequence or recorder.next_sequence()
        start_ns = time.monotonic_ns()
        try:
            return original(*args, **kwargs)
        finally:
            end_ns = time.monotonic_ns()
            self.sequence = None
            if substeps.running:
                substeps.switch("rest")
            elif end_ns - start_ns > _SHORT_NS:
                recorder.put_op(sequence, "reduce", "host", start_ns, end_ns)

    @wrapper
    def _wrap_copy(
        self,
        count_bytes: _CountBytes,
        original: Callable[..., Any],
        optimizer: Any,
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Wrap a copy of gradients to the host.

        `count_bytes` returns its bytes (None: none) before it.
        """
        recorder, substeps = self._recorder, self._substeps
        nbytes = None
        if not self._compiling() and recorder.recording and not self._copying:
            nbytes = _copied_bytes(count_bytes, optimizer, args)
        if nbytes is None:
            return original(optimizer, *args, **kwargs)
        is_substep = substeps.running and self.sequence is None
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
                fields = {"nbytes": nbytes, "parent": self.sequence}
                recorder.record_op(
                    "gradient down", "host", start_ns, time.monotonic_ns(), **fields
                )


def _copied_bytes(count_bytes: _CountBytes, optimizer: Any, args: Any) -> int | None:
    """Return the bytes that a call copies to host memory.

    Return None if none, or if this DeepSpeed version hides them.
    """
    if not offloads_state(optimizer):
        return None
    try:
        return count_bytes(optimizer, *args)
    except Exception:
        return None


def _stage_3_bytes(optimizer: Any, parameters: Any, gradients: Any) -> int | None:
    """Stage 3: return the bytes of a partition that goes into a buffer on the host.

    At the boundary it goes into the fp32 gradient too.
    """
    elements = [gradient.numel() for gradient in gradients]
    buffer = optimizer.grad_partitions_flat_buffer
    nbytes = sum(elements) * buffer.element_size() if buffer.device.type == "cpu" else 0
    # ebbtide's own engine takes the gradient from there, and records its copies itself.
    if optimizer.is_gradient_accumulation_boundary() and not hasattr(
        optimizer, "ebbtide_policy"
    ):
        nbytes += sum(
            _stage_3_boundary_bytes(optimizer, p, g) or 0
            for p, g in zip(parameters, gradients)
        )
    return nbytes or None


def _stage_3_boundary_bytes(
    optimizer: Any, parameter: Any, gradient: Any, *_: Any
) -> int | None:
    """Stage 3, at the boundary: the part of the fp32 gradient of one parameter, if it
    is in host memory."""
    subgroup = optimizer.grad_position[optimizer.get_param_id(parameter)][0]
    master = optimizer.fp32_partitioned_groups_flat[subgroup]
    if master.device.type != "cpu":
        return None
    return int(gradient.numel() * optimizer.master_weights_and_grads_dtype.itemsize)


def _accumulated_bytes(optimizer: Any, parameter: Any) -> int:
    """Stages 1 and 2, before the boundary: the whole gradient in the model's
    precision."""
    return int(parameter.numel() * parameter.element_size())


def _final_bytes(optimizer: Any, parameter: Any) -> int:
    """Stages 1 and 2, at the boundary: this rank's part of the gradient in fp32."""
    elements = optimizer.grad_position[optimizer.get_param_id(parameter)][3]
    return int(elements * optimizer.master_weights_and_grads_dtype.itemsize)


def _compact_bytes(
    optimizer: Any, parameter: Any, group: int | None = None
) -> int | None:
    """Stages 1 and 2 with gradients that are accumulated in fp32 on the device."""
    index = optimizer._get_param_group_idx(parameter) if group is None else group
    compact = (
        optimizer.is_gradient_accumulation_boundary()
        and optimizer._use_compact_grad_partition_buffer(index)
    )
    return _final_bytes(optimizer, parameter) if compact else None


# The modules of DeepSpeed that have imported the functions which submit requests.
SWAP_MODULES = (
    "optimizer_utils",
    "partitioned_optimizer_swapper",
    "pipelined_optimizer_swapper",
    "async_swapper",
)
# Methods of stage 3, and functions of its optimizer: all requests are submitted inside
# of one of them.
SWAP_METHODS = (
    "_optimizer_states_and_gradient_swap_in",
    "_optimizer_states_and_gradient_swap_out",
    "_swap_out_offload_fp32_gradients",
)
# DeepSpeed's files: [STATE-]FIRST_LAST[_gradient_OFFSET_LENGTH].tensor.swp, by a
# subgroup's first and last parameter.
_FILE = re.compile(
    r"(?:[^/]*-)?(?P<key>\d+_\d+)(?P<gradient>_gradient_\d+_\d+)?\.tensor\.swp$"
)
_NO_BUFFERS_NOTE = (
    "DeepSpeed ran out of buffers for swapping: raise offload_optimizer.buffer_count "
    "(12 for Adam with pipeline_read "
    "and pipeline_write, 8 with one of them)"
)


class _Request(NamedTuple):
    name: str
    resource: str
    subgroup: int | None
    start_ns: int
    nbytes: int


class StorageRecorder:
    """Records a row per subgroup and submission, up to the end of the wait for the
    handle that submitted it: DeepSpeed learns no sooner that a request has ended.

    In an update the waits are sub-steps; elsewhere they are rows of their own."""

    def __init__(
        self,
        recorder: Recorder,
        substeps: SubstepRecorder,
        reduction: GradientReduction,
        patches: Patches,
    ) -> None:
        self._recorder = recorder
        self._substeps = substeps
        self._reduction = reduction
        self._patches = patches
        self._in_flight: dict[int, list[_Request]] = {}  # by the id of the handle
        self._handle_classes: set[type] = set()
        # of the optimizer that swaps now, by the key in the names of its files
        self._subgroups: dict[str, int] = {}

    @wrapper
    def wrap_swap(
        self, original: Callable[..., Any], optimizer: Any, /, *args: Any, **kwargs: Any
    ) -> Any:
        """Wrap a method of the optimizer that submits requests.

        The names of its subgroups are learned from it.
        """
        if self._recorder.recording:
            masters = getattr(optimizer, "fp32_partitioned_groups_flat", ())
            self._subgroups = {
                str(getattr(master, "ds_id", "")): i for i, master in enumerate(masters)
            }
        return original(optimizer, *args, **kwargs)

    @wrapper
    def wrap_submit(
        self,
        resource: str,
        original: Callable[..., Any],
        handle: Any,
        buffers: Any,
        paths: Any,
        /,
    ) -> Any:
        """Wrap the function that submits reads or writes.

        `resource` is `storage_read` or `storage_write`.
        """
        start_ns = time.monotonic_ns()
        result = original(handle, buffers, paths)
        if self._recorder.recording:
            try:
                self._add(handle, buffers, paths, resource, start_ns)
            except Exception as error:
                self._recorder.fail(error)
        return result

    @wrapper
    def wrap_allocate(
        self, original: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Wrap the method that reserves buffers, which returns None if there are too
        few: DeepSpeed then fails."""
        buffers = original(*args, **kwargs)
        if buffers is None:
            self._recorder.note_once(_NO_BUFFERS_NOTE)
        return buffers

    def _add(
        self, handle: Any, buffers: Any, paths: Any, resource: str, start_ns: int
    ) -> None:
        kind = resource.partition("_")[2]
        sizes: dict[tuple[str, int | None], int] = {}
        for buffer, path in zip(buffers, paths):
            name, subgroup = kind, None
            file = _FILE.search(str(path))
            if file is not None:
                subgroup = self._subgroups.get(file["key"])
                name = f"gradient {kind}" if file["gradient"] else kind
            key = name, subgroup
            sizes[key] = sizes.get(key, 0) + int(buffer.numel()) * int(
                buffer.element_size()
            )
        requests = [
            _Request(name, resource, subgroup, start_ns, size)
            for (name, subgroup), size in sizes.items()
        ]
        self._in_flight.setdefault(id(handle), []).extend(requests)
        if type(handle) not in self._handle_classes:
            # A class in C++, which no import hook sees.
            self._handle_classes.add(type(handle))
            self._patches.wrap(type(handle), "wait", self._wrap_wait)

    @wrapper
    def _wrap_wait(
        self, original: Callable[..., Any], handle: Any, /, *args: Any, **kwargs: Any
    ) -> Any:
        recorder, substeps = self._recorder, self._substeps
        requests = self._in_flight.pop(id(handle), None)
        if not requests:
            return original(handle, *args, **kwargs)
        subgroups = {request.subgroup for request in requests}
        subgroup = subgroups.pop() if len(subgroups) == 1 else None
        interrupted = substeps.current
        substeps.switch("wait", "host", subgroup)
        start_ns = time.monotonic_ns()
        try:
            return original(handle, *args, **kwargs)
        finally:
            end_ns = time.monotonic_ns()
            for name, resource, own, submitted_ns, nbytes in requests:
                recorder.record_op(name, resource, submitted_ns, end_ns, own, nbytes)
            if interrupted is not None:
                substeps.switch(*interrupted)
            else:
                recorder.record_op(
                    "wait",
                    "host",
                    start_ns,
                    end_ns,
                    subgroup,
                    parent=self._reduction.sequence,
                )
