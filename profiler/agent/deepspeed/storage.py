"""Records what ZeRO-Infinity reads from storage and writes to it, and how long the job waits for that."""

from __future__ import annotations

import functools
import re
import time
from typing import Any, Callable, NamedTuple

from ..patches import Patches
from ..recorder import Recorder
from .reduction import GradientReduction
from .substeps import SubstepRecorder

# The modules of DeepSpeed that have imported the functions which submit requests.
SWAP_MODULES = ("optimizer_utils", "partitioned_optimizer_swapper", "pipelined_optimizer_swapper", "async_swapper")
# Methods of stage 3, and functions of its optimizer: all requests are submitted inside of one of them.
SWAP_METHODS = (
    "_optimizer_states_and_gradient_swap_in",
    "_optimizer_states_and_gradient_swap_out",
    "_swap_out_offload_fp32_gradients",
)
# Names of DeepSpeed's files: FIRST_LAST of a subgroup's parameters, before it the state's name, behind it the
# gradient's offset and length.
_FILE = re.compile(r"(?:[^/]*-)?(?P<key>\d+_\d+)(?P<gradient>_gradient_\d+_\d+)?\.tensor\.swp$")
_NO_BUFFERS_NOTE = (
    "DeepSpeed ran out of buffers for swapping: raise offload_optimizer.buffer_count (12 for Adam with pipeline_read "
    "and pipeline_write, 8 with one of them)"
)


class _Request(NamedTuple):
    name: str
    resource: str
    subgroup: int | None
    start_ns: int
    nbytes: int


class StorageRecorder:
    """Records a row per subgroup and submission, from its submission to the end of the wait for it.

    DeepSpeed learns that a request has ended only when it waits for the handle that submitted it. In an update the
    waits are sub-steps; elsewhere they are rows of their own.
    """

    def __init__(
        self, recorder: Recorder, substeps: SubstepRecorder, reduction: GradientReduction, patches: Patches
    ) -> None:
        self._recorder = recorder
        self._substeps = substeps
        self._reduction = reduction
        self._patches = patches
        self._in_flight: dict[int, list[_Request]] = {}  # by the id of the handle
        self._handle_classes: set[type] = set()
        self._subgroups: dict[str, int] = {}  # of the optimizer that swaps now, by the key in the names of its files

    def wrap_swap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a method of the optimizer that submits requests, to learn the names of its subgroups."""

        @functools.wraps(original)
        def swap(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if self._recorder.recording:
                masters = getattr(optimizer, "fp32_partitioned_groups_flat", ())
                self._subgroups = {str(getattr(master, "ds_id", "")): i for i, master in enumerate(masters)}
            return original(optimizer, *args, **kwargs)

        return swap

    def wrap_submit(self, original: Callable[..., Any], resource: str) -> Callable[..., Any]:
        """Wrap the function that submits reads or writes: `resource` is `storage_read` or `storage_write`."""

        @functools.wraps(original)
        def submit(handle: Any, buffers: Any, paths: Any) -> Any:
            start_ns = time.monotonic_ns()
            result = original(handle, buffers, paths)
            if self._recorder.recording:
                try:
                    self._add(handle, buffers, paths, resource, start_ns)
                except Exception as error:
                    self._recorder.fail(error)
            return result

        return submit

    def wrap_allocate(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the method that reserves buffers, which returns None if there are too few: DeepSpeed then fails."""

        @functools.wraps(original)
        def allocate(*args: Any, **kwargs: Any) -> Any:
            buffers = original(*args, **kwargs)
            if buffers is None:
                self._recorder.note_once(_NO_BUFFERS_NOTE)
            return buffers

        return allocate

    def _add(self, handle: Any, buffers: Any, paths: Any, resource: str, start_ns: int) -> None:
        kind = resource.partition("_")[2]
        sizes: dict[tuple[str, int | None], int] = {}
        for buffer, path in zip(buffers, paths):
            name, subgroup = kind, None
            file = _FILE.search(str(path))
            if file is not None:
                subgroup = self._subgroups.get(file["key"])
                name = f"gradient {kind}" if file["gradient"] else kind
            key = name, subgroup
            sizes[key] = sizes.get(key, 0) + int(buffer.numel()) * int(buffer.element_size())
        requests = [_Request(name, resource, subgroup, start_ns, size) for (name, subgroup), size in sizes.items()]
        self._in_flight.setdefault(id(handle), []).extend(requests)
        if type(handle) not in self._handle_classes:
            # A class in C++, which no import hook sees.
            self._handle_classes.add(type(handle))
            self._patches.wrap(type(handle), "wait", self._wrap_wait)

    def _wrap_wait(self, original: Callable[..., Any]) -> Callable[..., Any]:
        recorder, substeps = self._recorder, self._substeps

        @functools.wraps(original)
        def wait(handle: Any, *args: Any, **kwargs: Any) -> Any:
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
                    sequence, parent = recorder.next_sequence(), self._reduction.sequence
                    recorder.put_op(sequence, "wait", "host", start_ns, end_ns, subgroup, parent=parent)

        return wait


def largest_gradient_bytes(optimizer: Any) -> int | None:
    """Return the bytes of the largest piece of a gradient that is swapped to storage; None if there is none."""
    swapper = getattr(optimizer, "optimizer_swapper", None)
    infos = getattr(swapper, "swap_params_info", {}).values()
    lengths = [int(gradient.length) for info in infos for gradient in info.swapped_gradients.values()]
    return max(lengths) * int(swapper.swap_element_size) if swapper is not None and lengths else None


def has_lost_moments(engine: Any) -> bool:
    """Return whether an engine that has loaded a checkpoint of trained steps has no moments of a swapped subgroup.

    DeepSpeed copies the files of the moments, but a new process does not know of them: it begins with zeros.
    """
    swapper = getattr(engine.optimizer, "optimizer_swapper", None)
    infos = getattr(swapper, "swap_params_info", {}).values()
    return int(engine.global_steps) > 0 and any(not info.has_state_tensors for info in infos)
