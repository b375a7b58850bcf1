"""Where DeepSpeed is watched: the engine's backward and update, and the sub-steps of the ZeRO optimizers.

DeepSpeed is never imported here: its classes are wrapped once the job has imported them, as far as its version has
them, and everything is undone by `DeepSpeedHooks.remove`.
"""

from __future__ import annotations

import functools
from typing import Any, Callable
from weakref import WeakSet

from ..hooks import as_backward
from ..imports import when_imported
from ..patches import Patches
from ..recorder import UPDATE, Recorder
from .reduction import Reduction
from .settings import facts
from .substeps import SubSteps
from .zero_steps import STAGE_1_AND_2, STAGE_3, Row

_ZERO = "deepspeed.runtime.zero."


class DeepSpeedHooks:
    """Watches DeepSpeed for `recorder` from creation to `remove`."""

    def __init__(self, recorder: Recorder, torch: Any) -> None:
        self._recorder = recorder
        self._steps = SubSteps(recorder)
        self._reduction = Reduction(recorder, self._steps, torch)
        self._patches = Patches()
        self._compiling = torch.compiler.is_compiling
        self._told: WeakSet[Any] = WeakSet()
        self._waiting = [
            when_imported("deepspeed.runtime.engine", self._engine),
            when_imported(_ZERO + "stage3", self._stage_3),
            when_imported(_ZERO + "stage_1_and_2", self._stage_1_and_2),
        ]

    def remove(self) -> None:
        for call_off in self._waiting:
            call_off()
        self._patches.undo()

    def _engine(self, module: Any) -> None:
        engine = module.DeepSpeedEngine
        self._patches.wrap(engine, "backward", functools.partial(as_backward, self._recorder, self._compiling))
        self._patches.wrap(engine, "_take_model_step", functools.partial(self._update, of_engine=True, steps=True))
        # Without managed accumulation gradients are reduced and copied when the update begins.
        self._patches.wrap(engine, "allreduce_gradients", functools.partial(self._update, of_engine=True))

    def _stage_3(self, module: Any) -> None:
        optimizer = module.DeepSpeedZeroOptimizer_Stage3
        self._zero(optimizer, STAGE_3)
        self._patches.wrap(optimizer, f"_{optimizer.__name__}__reduce_and_partition_ipg_grads", self._reduction.reduce)
        for name, wrapper in self._reduction.stage_3.items():
            self._patches.wrap(optimizer, name, wrapper)

    def _stage_1_and_2(self, module: Any) -> None:
        optimizer = module.DeepSpeedZeroOptimizer
        self._zero(optimizer, STAGE_1_AND_2)
        self._patches.wrap(module, "all_gather_dp_groups", functools.partial(self._sub_step, row=Row("gather")))
        self._patches.wrap(optimizer, "reduce_ipg_grads", self._reduction.reduce)
        for name, wrapper in self._reduction.stage_1_and_2.items():
            self._patches.wrap(optimizer, name, wrapper)

    def _zero(self, optimizer: Any, rows: dict[str, Row]) -> None:
        self._patches.wrap(optimizer, "finalize_gradient_accumulation_boundary", self._update)
        for name, row in rows.items():
            self._patches.wrap(optimizer, name, functools.partial(self._sub_step, row=row))

    def _update(self, original: Callable[..., Any], of_engine: bool = False, steps: bool = False) -> Callable[..., Any]:
        """A method of an optimizer or an engine as an update; `steps`: the engine's optimizer steps in it."""
        recorder = self._recorder

        @functools.wraps(original)
        def update(owner: Any, *args: Any, **kwargs: Any) -> Any:
            outermost = recorder.enter(UPDATE)
            # Our own engine tells of its operations itself.
            if outermost and not hasattr(owner.optimizer if of_engine else owner, "ebbtide_policy"):
                self._steps.begin()
            try:
                return original(owner, *args, **kwargs)
            finally:
                at = self._steps.end() if outermost else None
                if steps and recorder.busy:
                    self._stepped(owner, outermost)
                if outermost:
                    recorder.leave(at=at)

        return update

    def _stepped(self, engine: Any, outermost: bool) -> None:
        """The engine's optimizer stands for those it holds, which step once per subgroup, or not at all."""
        recorder, optimizer = self._recorder, engine.optimizer
        if outermost:
            recorder.stepped.clear()
        recorder.stepped.append(optimizer)
        if not recorder.recording or engine in self._told:
            return
        self._told.add(engine)
        try:
            recorder.facts.tell("deepspeed", facts(engine, recorder.recomputes))
        except Exception as error:
            recorder.facts.note(f"DeepSpeed's facts could not be read: {error!r}")

    def _sub_step(self, original: Callable[..., Any], row: Row) -> Callable[..., Any]:
        steps = self._steps

        @functools.wraps(original)
        def sub_step(*args: Any, **kwargs: Any) -> Any:
            if not steps.running:
                return original(*args, **kwargs)
            subgroup = row.enter(steps, args)
            try:
                return original(*args, **kwargs)
            finally:
                row.leave(steps, args, subgroup)

        return sub_step
