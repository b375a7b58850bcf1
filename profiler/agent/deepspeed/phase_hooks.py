"""Detects DeepSpeed's phases: the engine's backward and update, and the sub-steps of the ZeRO optimizers.

PyTorch's phases, the forward among them, are detected in `../phase_hooks.py`. DeepSpeed is never imported here: its
classes are wrapped once the job has imported them, as far as its version has them. `DeepSpeedHooks.remove` undoes
everything.
"""

from __future__ import annotations

import functools
from typing import Any, Callable
from weakref import WeakSet

from ..imports import when_imported
from ..patches import Patches
from ..phase_hooks import wrap_backward
from ..phase_record import UPDATE
from ..recorder import Recorder
from .reduction import GradientReduction
from .settings import describe_engine
from .substeps import SubstepRecorder
from .zero_substeps import STAGE_1_AND_2, STAGE_3, SubstepMethod

_ZERO = "deepspeed.runtime.zero."


class DeepSpeedHooks:
    """Reports DeepSpeed's phases and sub-steps to `recorder`, from creation to `remove`."""

    def __init__(self, recorder: Recorder, torch: Any) -> None:
        self._recorder = recorder
        self._substeps = SubstepRecorder(recorder)
        self._reduction = GradientReduction(recorder, self._substeps, torch)
        self._patches = Patches()
        self._compiling = torch.compiler.is_compiling
        self._described_engines: WeakSet[Any] = WeakSet()
        self._cancel_callbacks = [
            when_imported("deepspeed.runtime.engine", self._patch_engine),
            when_imported(_ZERO + "stage3", self._patch_stage_3),
            when_imported(_ZERO + "stage_1_and_2", self._patch_stage_1_and_2),
        ]

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
        # Without managed accumulation, gradients are reduced and copied when the update begins.
        self._patches.wrap(engine, "allreduce_gradients", functools.partial(self._wrap_update, of_engine=True))

    def _patch_stage_3(self, module: Any) -> None:
        optimizer = module.DeepSpeedZeroOptimizer_Stage3
        self._patch_optimizer(optimizer, STAGE_3)
        reduce_name = f"_{optimizer.__name__}__reduce_and_partition_ipg_grads"
        self._patches.wrap(optimizer, reduce_name, self._reduction.wrap_reduce)
        for name, wrapper in self._reduction.stage_3.items():
            self._patches.wrap(optimizer, name, wrapper)

    def _patch_stage_1_and_2(self, module: Any) -> None:
        optimizer = module.DeepSpeedZeroOptimizer
        self._patch_optimizer(optimizer, STAGE_1_AND_2)
        gather = functools.partial(self._wrap_substep, method=SubstepMethod("gather"))
        self._patches.wrap(module, "all_gather_dp_groups", gather)
        self._patches.wrap(optimizer, "reduce_ipg_grads", self._reduction.wrap_reduce)
        for name, wrapper in self._reduction.stage_1_and_2.items():
            self._patches.wrap(optimizer, name, wrapper)

    def _patch_optimizer(self, optimizer: Any, methods: dict[str, SubstepMethod]) -> None:
        self._patches.wrap(optimizer, "finalize_gradient_accumulation_boundary", self._wrap_update)
        for name, method in methods.items():
            self._patches.wrap(optimizer, name, functools.partial(self._wrap_substep, method=method))

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
        """Note a step of the engine's optimizer.

        It represents the optimizers that it contains, which step once per subgroup, or not at all.
        """
        recorder, optimizer = self._recorder, engine.optimizer
        if outermost:
            recorder.stepped.clear()
        recorder.stepped.append(optimizer)
        if not recorder.recording or engine in self._described_engines:
            return
        self._described_engines.add(engine)
        try:
            recorder.files.job_info.set("deepspeed", describe_engine(engine, recorder.recomputes))
        except Exception as error:
            recorder.files.job_info.note(f"DeepSpeed's settings could not be read: {error!r}")

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
