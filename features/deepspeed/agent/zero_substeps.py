"""The methods of DeepSpeed's ZeRO optimizers that are recorded as sub-steps of an
update."""

from __future__ import annotations

import time
from typing import Any, Callable, NamedTuple

from ebbtide.profiler.agent.recorder import Recorder
from ebbtide.profiler.agent.spool import HOST

from .zero_optimizer import compute_resource, fp32_masters, subgroup_sizes

# A shorter `rest` counts with the row before it: it is mostly the agent's own time.
_SHORT_NS = 10_000


class _Substep(NamedTuple):
    name: str
    resource: str
    subgroup: int | None
    nbytes: int | None


_REST = _Substep("rest", "host", None, None)


class _Row:
    def __init__(
        self, sequence: int, substep: _Substep, start_ns: int, mark: Any
    ) -> None:
        self.sequence = sequence
        self.substep = substep
        self.start_ns = self.end_ns = start_ns
        self.mark = mark


class SubstepRecorder:
    """Records what the open update does, from `begin` to `end`.

    The thread that runs the update calls these. A row is recorded once the next has run
    for a while, since the next row may turn out to be a part of the first. Rows on a
    GPU get their device times from marks on the job's stream, as phases do.

    `updates`: how many updates of a subgroup have begun in it."""

    def __init__(self, recorder: Recorder) -> None:
        self.running = False
        self.updates = 0
        self._recorder = recorder
        self._row: _Row | None = None
        self._previous: _Row | None = None

    def begin(self) -> None:
        """Start with the recorder's open phase, an update.

        Its first sub-step is `rest`.
        """
        if self._recorder.recording:
            self.running, self.updates = True, 0
            self._row = self._begin_row(_REST, self._recorder.started_ns)

    def switch(
        self,
        name: str,
        resource: str = "host",
        subgroup: int | None = None,
        nbytes: int | None = None,
    ) -> None:
        """Begin another sub-step now. Never raises."""
        row, substep = self._row, _Substep(name, resource, subgroup, nbytes)
        if not self.running or row is None or substep == row.substep:
            return
        try:
            self._switch(row, substep, time.monotonic_ns())
        except Exception as error:
            self.running = False
            self._recorder.fail(error)

    def _switch(self, row: _Row, substep: _Substep, now_ns: int) -> None:
        previous = self._previous
        if (
            previous is not None
            and row.substep.name == "rest"
            and now_ns - row.start_ns < _SHORT_NS
        ):
            previous.end_ns = now_ns
            if previous.substep == substep and previous.mark is None:
                self._row, self._previous = previous, None
                return
        else:
            if previous is not None:
                self._put(previous)
            self._end_row(row, now_ns)
            self._previous = row
        if substep.name == "update":
            self.updates += 1
        self._row = self._begin_row(substep, now_ns)

    def end(self) -> int | None:
        """Record the last rows of the update, and return its end in ns.

        Return None if it was not recorded. Never raises.
        """
        if not self.running or self._row is None:
            return None
        now_ns = time.monotonic_ns()
        try:
            self._end_row(self._row, now_ns)
            for row in (self._previous, self._row):
                if row is not None:
                    self._put(row)
        except Exception as error:
            self._recorder.fail(error)
        self.running, self._row, self._previous = False, None, None
        return now_ns

    @property
    def current(self) -> tuple[str, str, int | None, int | None] | None:
        """The arguments of `switch` of the row that runs; None outside of an update."""
        return self._row.substep if self.running and self._row is not None else None

    @property
    def sequence(self) -> int | None:
        """The sequence number of the row that runs; None outside of an update."""
        return self._row.sequence if self._row is not None else None

    def _begin_row(self, substep: _Substep, now_ns: int) -> _Row:
        mark = self._recorder.gpu.record_mark() if substep.resource == "gpu" else None
        return _Row(self._recorder.next_sequence(), substep, now_ns, mark)

    def _end_row(self, row: _Row, now_ns: int) -> None:
        row.end_ns = now_ns
        if row.mark is not None:
            self._recorder.gpu.add_span(
                row.sequence, row.mark, self._recorder.gpu.record_mark()
            )

    def _put(self, row: _Row) -> None:
        device = HOST if row.mark is None else row.mark.device
        name, resource, subgroup, nbytes = row.substep
        self._recorder.put_op(
            row.sequence,
            name,
            resource,
            row.start_ns,
            row.end_ns,
            subgroup,
            nbytes,
            device=device,
        )


class SubstepMethod(NamedTuple):
    """A method that is one row of `ops`. `find_subgroup` gets the sub-steps so far and
    the method's arguments. `then`: the sub-step that begins when it has returned; None:
    its own goes on in the lines that follow the call. `leaves_out`: whether the method,
    by its arguments, does nothing that is recorded."""

    name: str
    find_subgroup: Callable[[SubstepRecorder, Any], int | None] = (
        lambda substeps, args: None
    )
    find_resource: Callable[[Any, int], str] = lambda optimizer, subgroup: "host"
    then: str | None = "rest"
    leaves_out: Callable[[Any], bool] = lambda args: False

    def enter(self, substeps: SubstepRecorder, args: Any) -> int | None:
        """Begin the row, and return its subgroup (None: none, or not known). Never
        raises."""
        if self.leaves_out(args):
            return None
        subgroup, resource, nbytes = None, "host", None
        try:
            subgroup = self.find_subgroup(substeps, args)
            if subgroup is not None:
                resource = self.find_resource(args[0], subgroup)
                nbytes = (
                    _upload_bytes(args[0], subgroup)
                    if self.name == "parameters"
                    else None
                )
        except Exception:
            pass
        substeps.switch(self.name, resource, subgroup, nbytes)
        return subgroup

    def leave(self, substeps: SubstepRecorder, args: Any, subgroup: int | None) -> None:
        """End the row, as the method has returned."""
        if self.then == "parameters":
            SubstepMethod("parameters", lambda *_: subgroup).enter(substeps, args)
        elif self.then is not None:
            substeps.switch(self.then)


def _is_on_cpu(args: Any) -> bool:
    """Return whether SuperOffload's update leaves out a subgroup.

    The state of such a subgroup is on the CPU.
    """
    try:
        return bool(args[0].subgroup_to_device[args[1]] == "cpu")
    except Exception:
        return False


def _argument(substeps: SubstepRecorder, args: Any) -> int:
    """Return the subgroup from the method's first argument."""
    return int(args[1])


def _owner_of_gradient(substeps: SubstepRecorder, args: Any) -> int:
    """Return the subgroup of the gradient that stages 1 and 2 unscale.

    ZenFlow unscales all before any update.
    """
    gradient = args[1][0]
    for subgroup, master in enumerate(fp32_masters(args[0])):
        if any(gradient is buffer for buffer in getattr(master, "overlap_grad", ())):
            return subgroup
    return substeps.updates


def _master_resource(optimizer: Any, subgroup: int) -> str:
    return compute_resource(fp32_masters(optimizer)[subgroup])


def _gradient_resource(optimizer: Any, subgroup: int) -> str:
    master = fp32_masters(optimizer)[subgroup]
    return compute_resource(master if master.grad is None else master.grad)


def _upload_bytes(optimizer: Any, subgroup: int) -> int | None:
    """Return the bytes of a subgroup's parameters that are copied to the device.

    Return None if its state is there.
    """
    if _master_resource(optimizer, subgroup) != "cpu":
        return None
    return int(subgroup_sizes(optimizer)[subgroup] * optimizer.dtype.itemsize)


STAGE_3 = {
    "_overflow_check_and_loss_scale_update": SubstepMethod("overflow check"),
    "_get_norm_groups": SubstepMethod("gradient norm"),
    "_prepare_sub_group": SubstepMethod("prepare", _argument),
    "unscale_and_clip_grads": SubstepMethod("unscale", _argument, _gradient_resource),
    "_optimizer_step": SubstepMethod("update", _argument, _master_resource),
    "_reassign_or_swap_out_partitioned_parameters": SubstepMethod(
        "parameters", _argument
    ),
    "_release_sub_group": SubstepMethod("release", _argument),
    "_post_step": SubstepMethod("gather"),
}

STAGE_1_AND_2 = {
    "check_overflow": SubstepMethod("overflow check"),
    "scaled_global_norm": SubstepMethod("gradient norm"),
    # No number is passed to it, but subgroups are updated in order.
    "free_grad_in_param_list": SubstepMethod(
        "prepare", lambda substeps, args: substeps.updates, then=None
    ),
    "unscale_and_clip_grads": SubstepMethod(
        "unscale", _owner_of_gradient, _gradient_resource
    ),
    # Its parameters are copied back in the lines that follow it.
    "_optimizer_step": SubstepMethod(
        "update", _argument, _master_resource, then="parameters"
    ),
    "reset_cpu_buffers": SubstepMethod("rest"),
    "_update_model_bit16_weights": SubstepMethod("gather"),
}

# What SuperOffload's subclass of stage 3 replaces and adds.
SUPER_OFFLOAD = {
    "_optimizer_step": SubstepMethod(
        "update", _argument, _master_resource, leaves_out=_is_on_cpu
    ),
    "_reassign_or_swap_out_partitioned_parameters": STAGE_3[
        "_reassign_or_swap_out_partitioned_parameters"
    ],
    "_wait_for_async_operations": SubstepMethod("wait"),
    # Its first argument is the parameter group.
    "_sync_cpu_optimizer_step": SubstepMethod(
        "wait", lambda substeps, args: int(args[2])
    ),
}
