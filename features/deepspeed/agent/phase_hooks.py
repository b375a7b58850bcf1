"""Detects DeepSpeed's phases: the engine's backward and update, and the sub-steps of
the ZeRO optimizers.

`profiler/agent/phase_hooks.py` detects PyTorch's phases, the forward among them.
DeepSpeed is never imported here: its classes are wrapped once the job has imported
them, as far as its version has them, until `DeepSpeedHooks.remove`.
"""

from __future__ import annotations

import functools
import time
from typing import Any, Callable
from weakref import WeakKeyDictionary, WeakSet

from ebbtide.profiler.agent.frames import hidden
from ebbtide.profiler.agent.iteration_rule import UPDATE
from ebbtide.profiler.agent.patches import Patches, Wrapper, Wrappers, wrapper
from ebbtide.profiler.agent.phase_hooks import MicroBatches, wrap_backward
from ebbtide.profiler.agent.recorder import Recorder

from .storage import SWAP_METHODS, SWAP_MODULES, GradientReduction, StorageRecorder
from .zero_optimizer import describe_engine, has_lost_moments, swaps_to_disk
from .zero_substeps import (
    STAGE_1_AND_2,
    STAGE_3,
    SUPER_OFFLOAD,
    SubstepMethod,
    SubstepRecorder,
)

# The key that the worker adds to its results: start and end of the task in ns.
_TIMES = "ebbtide_times_ns"
_UNOBSERVED_NOTE = (
    "the updates of SuperOffload's worker process are missing: `ebbtide profile` "
    "records them"
)


class DeepSpeedHooks:
    """Reports DeepSpeed's phases and sub-steps to `recorder` from creation on until
    `remove`."""

    def __init__(self, recorder: Recorder, torch: Any) -> None:
        self._recorder = recorder
        self._substeps = SubstepRecorder(recorder)
        self._reduction = GradientReduction(recorder, self._substeps, torch)
        self._patches = Patches()
        self._compiling = torch.compiler.is_compiling
        self._described_engines: WeakSet[Any] = WeakSet()
        self._lost_moments: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
        for name, wrappers in self._wrappers().items():
            self._patches.wrap_when_imported(f"deepspeed.{name}", wrappers)
        self._patches.when_imported(
            "deepspeed.runtime.pipe.engine", self._patch_pipeline_engine
        )

    def remove(self) -> None:
        """Restore DeepSpeed as it was, and wait for none of its imports any more."""
        self._patches.undo()

    def _patch_pipeline_engine(self, module: Any) -> None:
        engine, batches = module.PipelineEngine, MicroBatches(self._recorder)
        instructions = dict(engine._INSTRUCTION_MAP)
        for instruction, method in engine._INSTRUCTION_MAP.items():
            if method.__name__ in ("_exec_forward_pass", "_exec_backward_pass"):
                instructions[instruction] = batches.wrap(
                    method.__name__ == "_exec_forward_pass", method
                )
        self._patches.set(engine, "_INSTRUCTION_MAP", instructions)

    def _wrappers(self) -> dict[str, Wrappers]:
        """Return the wrappers by module, class and name.

        The class is "" for functions of the module.
        """
        partial, reduction = functools.partial, self._reduction
        update = partial(self._wrap_update, False, False)
        storage = StorageRecorder(
            self._recorder, self._substeps, reduction, self._patches
        )
        partition = {"partition_grads": reduction.stage_3["partition_grads"]}
        swaps = {
            "swap_in_tensors": partial(storage.wrap_submit, "storage_read"),
            "swap_out_tensors": partial(storage.wrap_submit, "storage_write"),
        }
        return {
            "runtime.engine": {
                "DeepSpeedEngine": {
                    "backward": partial(wrap_backward, self._recorder, self._compiling),
                    "_take_model_step": partial(self._wrap_update, True, True),
                    "step": self._wrap_step,
                    # Without managed accumulation, gradients are reduced and copied
                    # when the update begins.
                    "allreduce_gradients": partial(self._wrap_update, True, False),
                    "load_checkpoint": self._wrap_load,
                }
            },
            "runtime.zero.stage3": {
                "DeepSpeedZeroOptimizer_Stage3": {
                    "finalize_gradient_accumulation_boundary": update,
                    **self._substep_wrappers(STAGE_3),
                    "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads": reduction.wrap_reduce,
                    **reduction.stage_3,
                    **dict.fromkeys(SWAP_METHODS, storage.wrap_swap),
                }
            },
            "runtime.zero.stage_1_and_2": {
                "": self._substep_wrappers(
                    {"all_gather_dp_groups": SubstepMethod("gather")}
                ),
                "DeepSpeedZeroOptimizer": {
                    "finalize_gradient_accumulation_boundary": update,
                    **self._substep_wrappers(STAGE_1_AND_2),
                    "reduce_ipg_grads": reduction.wrap_reduce,
                    **reduction.stage_1_and_2,
                },
            },
            "runtime.superoffload.superoffload_stage3": {
                "SuperOffloadOptimizer_Stage3": {
                    **self._substep_wrappers(SUPER_OFFLOAD),
                    **partition,
                }
            },
            "runtime.superoffload.superoffload_utils": {
                "": {"superoffload_optimizer_worker": wrap_worker},
                "SuperOffloadCPUOptimizer": {
                    "get_result": partial(wrap_receive, self._recorder)
                },
            },
            "runtime.swap_tensor.utils": {
                "SwapBufferManager": {"allocate": storage.wrap_allocate}
            },
            **{f"runtime.swap_tensor.{name}": {"": swaps} for name in SWAP_MODULES},
        }

    def _substep_wrappers(
        self, methods: dict[str, SubstepMethod]
    ) -> dict[str, Wrapper]:
        return {
            name: functools.partial(self._wrap_substep, method)
            for name, method in methods.items()
        }

    @wrapper
    def _wrap_step(
        self, original: Callable[..., Any], engine: Any, /, *args: Any, **kwargs: Any
    ) -> Any:
        """Wrap the engine's step.

        With ZenFlow, the engine updates the selected columns after its optimizer has
        stepped.
        """
        step = (
            self._wrap_update(True, False, original)
            if _ends_zenflow_interval(engine)
            else original
        )
        return step(engine, *args, **kwargs)

    @wrapper
    def _wrap_update(
        self,
        of_engine: bool,
        optimizer_steps: bool,
        original: Callable[..., Any],
        owner: Any,
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Wrap a method of an optimizer or an engine as an update.

        The engine's optimizer may step in it.
        """
        recorder = self._recorder
        outermost = recorder.enter(UPDATE)
        # ebbtide's own engine records its operations itself.
        if outermost and not hasattr(
            owner.optimizer if of_engine else owner, "ebbtide_policy"
        ):
            self._substeps.begin()
        try:
            return original(owner, *args, **kwargs)
        finally:
            end_ns = self._substeps.end() if outermost else None
            if optimizer_steps and recorder.in_phase:
                self._record_step(owner, outermost)
            if outermost:
                recorder.leave(end_ns=end_ns)

    def _record_step(self, engine: Any, outermost: bool) -> None:
        """Note a step of the engine's optimizer, for the optimizers in it, which step
        once per subgroup or not at all."""
        recorder, optimizer = self._recorder, engine.optimizer
        if outermost or _ends_zenflow_interval(engine):
            recorder.stepped.clear()
        recorder.stepped.append(optimizer)
        if not recorder.recording or engine in self._described_engines:
            return
        self._described_engines.add(engine)
        try:
            recorder.job_info.set(
                "deepspeed",
                describe_engine(
                    engine, recorder.recomputes, self._lost_moments.get(engine)
                ),
            )
        except Exception as error:
            recorder.job_info.note(f"DeepSpeed's settings could not be read: {error!r}")

    @wrapper
    def _wrap_load(
        self, original: Callable[..., Any], engine: Any, /, *args: Any, **kwargs: Any
    ) -> Any:
        """Wrap the engine's method that loads a checkpoint.

        Moments on storage may be lost after it.
        """
        result = original(engine, *args, **kwargs)
        try:
            if swaps_to_disk(engine.optimizer):
                self._lost_moments[engine] = has_lost_moments(engine)
        except Exception as error:
            self._recorder.job_info.note(
                f"DeepSpeed's loaded state could not be checked: {error!r}"
            )
        return result

    @wrapper
    def _wrap_substep(
        self,
        method: SubstepMethod,
        original: Callable[..., Any],
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if not self._substeps.running:
            return original(*args, **kwargs)
        subgroup = method.enter(self._substeps, args)
        try:
            return original(*args, **kwargs)
        finally:
            method.leave(self._substeps, args, subgroup)


def _ends_zenflow_interval(engine: Any) -> bool:
    """Return whether ZenFlow's optimizer steps after this micro-step.

    The engine must use ZenFlow.
    """
    try:
        return bool(
            getattr(engine, "zenflow", False)
            and engine.is_gradient_accumulation_boundary()
        )
    except Exception:
        return False


@wrapper
def wrap_worker(
    original: Callable[..., Any], tasks: Any, results: Any, /, *args: Any, **kwargs: Any
) -> Any:
    """Wrap the main function of SuperOffload's worker process, which stays importable
    under its own name.

    The agent in the worker adds the time of each task to its result."""
    get_task, put_result, received_ns = tasks.get, results.put, 0

    @hidden
    def get(*args: Any, **kwargs: Any) -> Any:
        nonlocal received_ns
        task = get_task(*args, **kwargs)
        received_ns = time.monotonic_ns()
        return task

    @hidden
    def put(result: Any, /, *args: Any, **kwargs: Any) -> None:
        if isinstance(result, dict) and "error" not in result:
            result[_TIMES] = received_ns, time.monotonic_ns()
        put_result(result, *args, **kwargs)

    tasks.get, results.put = get, put
    return original(tasks, results, *args, **kwargs)


@wrapper
def wrap_receive(
    recorder: Recorder,
    original: Callable[..., Any],
    owner: Any,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Wrap the method that returns the next result of the worker, or None.

    With a result, an update or a rollback is recorded.
    """
    result = original(owner, *args, **kwargs)
    if isinstance(result, dict):
        times = result.pop(_TIMES, None)
        if times is not None:
            name = "rollback" if result.get("event_type") == "rollback" else "update"
            recorder.record_op(
                name, "worker", *times, subgroup=result.get("sub_group_id")
            )
        elif recorder.recording:
            recorder.note_once(_UNOBSERVED_NOTE)
    return result
