"""Detects DeepSpeed's phases: the engine's backward and update, and the sub-steps of the ZeRO optimizers.

PyTorch's phases, the forward among them, are detected in `../phase_hooks.py`. DeepSpeed is never imported here: its
classes are wrapped once the job has imported them, as far as its version has them. `DeepSpeedHooks.remove` undoes
everything.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from typing import Any, Callable
from weakref import WeakKeyDictionary, WeakSet

from ..iteration_figures import UPDATE
from ..patches import Patches, when_imported
from ..phase_hooks import wrap_backward
from ..recorder import Recorder
from ..zero_optimizer import swaps_to_disk
from .settings import describe_engine
from .storage import SWAP_METHODS, SWAP_MODULES, GradientReduction, StorageRecorder, has_lost_moments
from .zenflow import ZenFlowRecorder
from .zero_substeps import STAGE_1_AND_2, STAGE_3, SUPER_OFFLOAD, ZENFLOW_STAGE_3, SubstepMethod, SubstepRecorder

_RUNTIME = "deepspeed.runtime."
# The key that the worker adds to its results: start and end of the task in ns.
_TIMES = "ebbtide_times_ns"
_UNOBSERVED_NOTE = (
    "SuperOffload's worker process is not recorded: its updates last from their submission to the receipt of their "
    "result, which includes waiting; `ebbtide profile` records the worker's own times"
)


class DeepSpeedHooks:
    """Reports DeepSpeed's phases and sub-steps to `recorder`, from creation to `remove`."""

    def __init__(self, recorder: Recorder, torch: Any) -> None:
        self._recorder = recorder
        self._substeps = SubstepRecorder(recorder)
        self._reduction = GradientReduction(recorder, self._substeps, torch)
        self._patches = Patches()
        self._compiling = torch.compiler.is_compiling
        self._described_engines: WeakSet[Any] = WeakSet()
        self._worker = SuperOffloadWorker(recorder)
        self._zenflow = ZenFlowRecorder(recorder, self._substeps, self._reduction)
        self._storage = StorageRecorder(recorder, self._substeps, self._reduction, self._patches)
        self._lost_moments: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
        callbacks = {
            "engine": self._patch_engine,
            "zero.stage3": self._patch_stage_3,
            "zero.stage_1_and_2": self._patch_stage_1_and_2,
            "superoffload.superoffload_stage3": self._patch_super_offload,
            "superoffload.superoffload_utils": self._patch_super_offload_worker,
            "zenflow.engine_stage3": self._patch_zenflow_stage_3,
            "zenflow.zenflow_stage_1_and_2": self._patch_zenflow_stage_1_and_2,
        }
        callbacks |= {f"swap_tensor.{name}": self._patch_swap_module for name in SWAP_MODULES}
        callbacks["swap_tensor.utils"] = self._patch_swap_buffers
        self._cancel_callbacks = [when_imported(_RUNTIME + name, callback) for name, callback in callbacks.items()]
        self._cancel_callbacks.append(
            when_imported("deepspeed.ops.adam.zenflow_torch_adam", self._patch_selective_optimizers)
        )

    def remove(self) -> None:
        """Restore DeepSpeed as it was, and wait for none of its imports any more."""
        for cancel in self._cancel_callbacks:
            cancel()
        self._patches.undo()

    def _patch_engine(self, module: Any) -> None:
        engine = module.DeepSpeedEngine
        self._patches.wrap(engine, "backward", functools.partial(wrap_backward, self._recorder, self._compiling))
        self._patches.wrap(
            engine, "_take_model_step", functools.partial(self._wrap_update, of_engine=True, optimizer_steps=True)
        )
        self._patches.wrap(engine, "step", self._wrap_step)
        # Without managed accumulation, gradients are reduced and copied when the update begins.
        self._patches.wrap(engine, "allreduce_gradients", functools.partial(self._wrap_update, of_engine=True))
        self._patches.wrap(engine, "load_checkpoint", self._wrap_load)

    def _patch_stage_3(self, module: Any) -> None:
        optimizer = module.DeepSpeedZeroOptimizer_Stage3
        self._patch_optimizer(optimizer, STAGE_3)
        reduce_name = f"_{optimizer.__name__}__reduce_and_partition_ipg_grads"
        self._patches.wrap(optimizer, reduce_name, self._reduction.wrap_reduce)
        for name, wrapper in self._reduction.stage_3.items():
            self._patches.wrap(optimizer, name, wrapper)

        for name in SWAP_METHODS:
            self._patches.wrap(optimizer, name, self._storage.wrap_swap)

    def _patch_swap_module(self, module: Any) -> None:
        for name, resource in (("swap_in_tensors", "storage_read"), ("swap_out_tensors", "storage_write")):
            self._patches.wrap(module, name, functools.partial(self._storage.wrap_submit, resource=resource))

    def _patch_swap_buffers(self, module: Any) -> None:
        self._patches.wrap(module.SwapBufferManager, "allocate", self._storage.wrap_allocate)

    def _patch_stage_1_and_2(self, module: Any) -> None:
        optimizer = module.DeepSpeedZeroOptimizer
        self._patch_optimizer(optimizer, STAGE_1_AND_2)
        gather = functools.partial(self._wrap_substep, method=SubstepMethod("gather"))
        self._patches.wrap(module, "all_gather_dp_groups", gather)
        self._patches.wrap(optimizer, "reduce_ipg_grads", self._reduction.wrap_reduce)
        for name, wrapper in self._reduction.stage_1_and_2.items():
            self._patches.wrap(optimizer, name, wrapper)

    def _patch_super_offload(self, module: Any) -> None:
        optimizer = module.SuperOffloadOptimizer_Stage3
        self._patch_substeps(optimizer, SUPER_OFFLOAD)
        self._patches.wrap(optimizer, "partition_grads", self._reduction.stage_3["partition_grads"])

    def _patch_super_offload_worker(self, module: Any) -> None:
        self._patches.wrap(module, "superoffload_optimizer_worker", self._worker.wrap_worker)
        self._patches.wrap(module.SuperOffloadCPUOptimizer, "async_step", self._worker.wrap_submit)
        self._patches.wrap(module.SuperOffloadCPUOptimizer, "get_result", self._worker.wrap_receive)

    def _patch_zenflow_stage_3(self, module: Any) -> None:
        self._patch_substeps(module, ZENFLOW_STAGE_3)
        self._patches.wrap(module, "partition_grads", self._reduction.stage_3["partition_grads"])
        self._patch_zenflow(module, module)

    def _patch_zenflow_stage_1_and_2(self, module: Any) -> None:
        name = "async_inplace_copy_grad_to_fp32_buffer_from_gpu"
        self._patches.wrap(module.ZenFlowZeroOptimizerParallel, name, self._reduction.stage_1_and_2[name])
        self._patch_zenflow(module, module.ZenFlowZeroOptimizer)

    def _patch_zenflow(self, module: Any, owner: Any) -> None:
        """Wrap what ZenFlow has in all stages; `owner` is the class or module that has its functions."""
        zenflow = self._zenflow
        for function, name in (
            ("update_selected_channels", "select columns"),
            ("sync_fp32_param_from_gpu", "parameters down"),
        ):
            self._patches.wrap(owner, function, functools.partial(zenflow.wrap_selection, name=name))
        self._patches.wrap(owner, "selective_optimizer_step", zenflow.wrap_selective_step)
        start = functools.partial(zenflow.wrap_process_start, patches=self._patches)
        self._patches.wrap(module, "start_optimizer_process", start)

    def _patch_selective_optimizers(self, module: Any) -> None:
        for name in ("ZenFlowSelectiveAdamW", "ZenFlowSelectiveAdamW_stage3"):
            self._patches.wrap(getattr(module, name, None), "group_step", self._zenflow.wrap_selective_update)

    def _patch_optimizer(self, optimizer: Any, methods: dict[str, SubstepMethod]) -> None:
        self._patches.wrap(optimizer, "finalize_gradient_accumulation_boundary", self._wrap_update)
        self._patch_substeps(optimizer, methods)

    def _patch_substeps(self, owner: Any, methods: dict[str, SubstepMethod]) -> None:
        for name, method in methods.items():
            self._patches.wrap(owner, name, functools.partial(self._wrap_substep, method=method))

    def _wrap_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the engine's step: with ZenFlow it updates the selected columns after its optimizer has stepped."""
        with_zenflow = self._wrap_update(original, of_engine=True)

        @functools.wraps(original)
        def step(engine: Any, *args: Any, **kwargs: Any) -> Any:
            return (with_zenflow if _ends_zenflow_interval(engine) else original)(engine, *args, **kwargs)

        return step

    def _wrap_update(
        self, original: Callable[..., Any], of_engine: bool = False, optimizer_steps: bool = False
    ) -> Callable[..., Any]:
        """Wrap a method of an optimizer or an engine as an update, in which the engine's optimizer may step."""
        recorder = self._recorder

        @functools.wraps(original)
        def update(owner: Any, *args: Any, **kwargs: Any) -> Any:
            outermost = recorder.enter(UPDATE)
            # ebbtide's own engine records its operations itself.
            if outermost and not hasattr(owner.optimizer if of_engine else owner, "ebbtide_policy"):
                self._substeps.begin()
            try:
                return original(owner, *args, **kwargs)
            finally:
                end_ns = self._substeps.end() if outermost else None
                if optimizer_steps and recorder.in_phase:
                    self._record_step(owner, outermost)
                if outermost:
                    recorder.leave(end_ns=end_ns)

        return update

    def _record_step(self, engine: Any, outermost: bool) -> None:
        """Note a step of the engine's optimizer, for those in it, which step once per subgroup or not at all."""
        recorder, optimizer = self._recorder, engine.optimizer
        if outermost or _ends_zenflow_interval(engine):
            recorder.stepped.clear()
        recorder.stepped.append(optimizer)
        if not recorder.recording or engine in self._described_engines:
            return
        self._described_engines.add(engine)
        try:
            recorder.files.job_info.set(
                "deepspeed", describe_engine(engine, recorder.recomputes, self._lost_moments.get(engine))
            )
        except Exception as error:
            recorder.files.job_info.note(f"DeepSpeed's settings could not be read: {error!r}")

    def _wrap_load(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the engine's method that loads a checkpoint, after which moments on storage may be lost."""

        @functools.wraps(original)
        def load(engine: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(engine, *args, **kwargs)
            try:
                if swaps_to_disk(engine.optimizer):
                    self._lost_moments[engine] = has_lost_moments(engine)
            except Exception as error:
                self._recorder.files.job_info.note(f"DeepSpeed's loaded state could not be checked: {error!r}")
            return result

        return load

    def _wrap_substep(self, original: Callable[..., Any], method: SubstepMethod) -> Callable[..., Any]:
        substeps = self._substeps

        @functools.wraps(original)
        def substep(*args: Any, **kwargs: Any) -> Any:
            if not substeps.running:
                return original(*args, **kwargs)
            subgroup = method.enter(substeps, args)
            try:
                return original(*args, **kwargs)
            finally:
                method.leave(substeps, args, subgroup)

        return substep


def _ends_zenflow_interval(engine: Any) -> bool:
    """Return whether the engine uses ZenFlow, and its optimizer steps after this micro-step."""
    try:
        return bool(getattr(engine, "zenflow", False) and engine.is_gradient_accumulation_boundary())
    except Exception:
        return False


class SuperOffloadWorker:
    """Records each update and rollback of the worker process as a row on the resource `worker`.

    The agent in the worker adds the time of each task to its result. The job records it when it receives the result.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        # The submission times of the tasks in flight, the oldest first: the worker does one after the other.
        self._submitted_ns: WeakKeyDictionary[Any, deque[int]] = WeakKeyDictionary()

    def wrap_worker(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the main function of the worker process, which stays importable under its own name."""

        @functools.wraps(original)
        def worker(param_queue: Any, result_queue: Any, *args: Any, **kwargs: Any) -> Any:
            tasks = _TaskQueue(param_queue)
            return original(tasks, _ResultQueue(result_queue, tasks), *args, **kwargs)

        return worker

    def wrap_submit(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the method that sends a task to the worker."""

        @functools.wraps(original)
        def submit(owner: Any, *args: Any, **kwargs: Any) -> Any:
            self._submitted_ns.setdefault(owner, deque()).append(time.monotonic_ns())
            return original(owner, *args, **kwargs)

        return submit

    def wrap_receive(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the method that returns the next result of the worker, or None."""

        @functools.wraps(original)
        def receive(owner: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(owner, *args, **kwargs)
            if isinstance(result, dict):
                times = result.pop(_TIMES, None)
                in_flight = self._submitted_ns.get(owner)
                submitted_ns = in_flight.popleft() if in_flight else None
                if self._recorder.recording:
                    self._record(result, times, submitted_ns)
            return result

        return receive

    def _record(self, result: Any, times: tuple[int, int] | None, submitted_ns: int | None) -> None:
        recorder = self._recorder
        if times is None:
            if submitted_ns is None:
                return  # submitted before the recording began
            times = submitted_ns, time.monotonic_ns()
            recorder.note_once(_UNOBSERVED_NOTE)
        name = "rollback" if result.get("event_type") == "rollback" else "update"
        recorder.record_op(name, "worker", *times, subgroup=result.get("sub_group_id"))


class _Queue:
    """A queue with all that the original one has."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)


class _TaskQueue(_Queue):
    """The worker's queue of tasks, which notes when a task is received."""

    received_ns = 0

    def get(self, *args: Any) -> Any:
        task = self._queue.get(*args)
        self.received_ns = time.monotonic_ns()
        return task


class _ResultQueue(_Queue):
    """The worker's queue of results, which adds the times of the task to each."""

    def __init__(self, queue: Any, tasks: _TaskQueue) -> None:
        super().__init__(queue)
        self._tasks = tasks

    def put(self, result: Any, *args: Any) -> None:
        if isinstance(result, dict) and "error" not in result:
            result[_TIMES] = self._tasks.received_ns, time.monotonic_ns()
        self._queue.put(result, *args)
