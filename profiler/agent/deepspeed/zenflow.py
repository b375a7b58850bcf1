"""Records ZenFlow: its updates of selected columns, and the updates in its optimizer process."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from typing import Any, Callable, Optional

from ..patches import Patches, wrapper
from ..recorder import Recorder
from ..spool import HOST
from ..zero_optimizer import compute_resource, local_tensor
from .storage import GradientReduction
from .zero_substeps import SubstepRecorder

_PROCESS_NOTE = (
    "ZenFlow's optimizer process cannot be observed: its rows `update` on `worker` last from their submission until "
    "the job has waited for them; where the job hardly waits, they ended earlier than that"
)

_Find = Optional[Callable[[Any], Any]]


class ZenFlowRecorder:
    """Records what ZenFlow adds to the backward and to the update."""

    def __init__(self, recorder: Recorder, substeps: SubstepRecorder, reduction: GradientReduction) -> None:
        self._recorder = recorder
        self._substeps = substeps
        self._reduction = reduction
        # By the address of the memory shared with an optimizer process: submission times of its updates in flight.
        self._submitted_ns: dict[int, deque[int]] = {}

    @wrapper
    def wrap_process_start(
        self, patches: Patches, original: Callable[..., Any], optimizer: Any, /, *args: Any, **kwargs: Any
    ) -> Any:
        """Wrap the function that starts the optimizer process: its commands are known from then on."""
        result = original(optimizer, *args, **kwargs)
        with contextlib.suppress(Exception):
            extension = optimizer.zf_op
            if self._recorder.live and not hasattr(extension.zenflow_adam_wait, "__wrapped__"):
                patches.wrap(extension, "zenflow_adam_submit", self._wrap_submit)
                patches.wrap(extension, "zenflow_adam_wait", self._wrap_wait)
            # The memory of an optimizer process that has ended may be used again.
            self._submitted_ns.pop(optimizer.zf_ctrl.data_ptr(), None)
        return result

    @wrapper
    def _wrap_submit(self, original: Callable[..., Any], control: int, /, *args: Any, **kwargs: Any) -> Any:
        self._submitted_ns.setdefault(control, deque()).append(time.monotonic_ns())
        return original(control, *args, **kwargs)

    @wrapper
    def _wrap_wait(self, original: Callable[..., Any], control: int, /, *args: Any, **kwargs: Any) -> Any:
        self._substeps.switch("wait")
        done = original(control, *args, **kwargs)
        in_flight = self._submitted_ns.get(control)
        if done and in_flight:
            start_ns = in_flight.popleft()
            if self._recorder.recording:
                self._recorder.note_once(_PROCESS_NOTE)
                self._recorder.record_op("update", "worker", start_ns, time.monotonic_ns())
        if done:
            # The lines that follow copy the updated parameters to the device.
            self._substeps.switch("parameters")
        return done

    @wrapper
    def wrap(
        self, name: str, find_optimizer: _Find, original: Callable[..., Any], owner: Any, /, *args: Any, **kwargs: Any
    ) -> Any:
        """Wrap a function as a sub-step in an update, and as an operation of its own elsewhere. `find_optimizer`
        returns from its first argument the optimizer whose parameters tell where it runs; None: on the host."""
        recorder, substeps = self._recorder, self._substeps
        if not recorder.recording:
            return original(owner, *args, **kwargs)
        resource = "host" if find_optimizer is None else _resource(find_optimizer, owner)
        if substeps.running:
            substeps.switch(name, resource)
            try:
                return original(owner, *args, **kwargs)
            finally:
                substeps.switch("rest")
        mark = recorder.mark_time() if resource == "gpu" else None
        start_ns = time.monotonic_ns()
        try:
            return original(owner, *args, **kwargs)
        finally:
            sequence, end_ns = recorder.next_sequence(), time.monotonic_ns()
            device = HOST if mark is None else mark.device
            parent = self._reduction.sequence
            recorder.put_op(sequence, name, resource, start_ns, end_ns, parent=parent, device=device)
            if mark is not None:
                recorder.gpu.add_span(sequence, mark, recorder.mark_time())


def _resource(find_optimizer: Callable[[Any], Any], owner: Any) -> str:
    """Return the resource of an optimizer's parameters; `host` if this version of DeepSpeed hides it."""
    try:
        return compute_resource(local_tensor(find_optimizer(owner).param_groups[0]["params"][0]))
    except Exception:
        return "host"
