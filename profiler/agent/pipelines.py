"""Numbers the micro-batches that pipeline schedules interleave: those of torch.distributed.pipelining and DeepSpeed.

Their forwards and backwards are detected as all others are. The schedules' own methods tell which micro-batch each of
them belongs to. Nothing is imported here: the classes are wrapped once the job has imported them.
"""

from __future__ import annotations

import functools
from typing import Any, Callable
from weakref import WeakKeyDictionary

from .imports import when_imported
from .patches import Patches
from .recorder import Recorder


class _Stage:
    """The micro-batches of one pipeline stage: how many began, and the number of each one in flight."""

    def __init__(self) -> None:
        self.count = 0
        self.numbers: dict[Any, int] = {}


class PipelineHooks:
    """Reports the current micro-batch to `recorder`, from creation to `remove`."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._patches = Patches()
        self._stages: WeakKeyDictionary[Any, _Stage] = WeakKeyDictionary()
        self._cancel_callbacks = [
            when_imported("torch.distributed.pipelining.stage", self._patch_torch),
            when_imported("deepspeed.runtime.pipe.engine", self._patch_deepspeed),
        ]

    def remove(self) -> None:
        """Restore the classes as they were, and wait for none of their imports any more."""
        for cancel in self._cancel_callbacks:
            cancel()
        self._patches.undo()

    def _patch_torch(self, module: Any) -> None:
        stage = module._PipelineStageBase
        self._patches.wrap(stage, "forward_one_chunk", functools.partial(self._wrap, begins=True))
        for name in ("backward_one_chunk", "backward_weight_one_chunk"):
            self._patches.wrap(stage, name, functools.partial(self._wrap, begins=False))

    def _patch_deepspeed(self, module: Any) -> None:
        engine = module.PipelineEngine
        instructions = dict(engine._INSTRUCTION_MAP)
        for instruction, method in engine._INSTRUCTION_MAP.items():
            if method.__name__ in ("_exec_forward_pass", "_exec_backward_pass"):
                instructions[instruction] = self._wrap(method, begins=method.__name__ == "_exec_forward_pass")
        self._patches.set(engine, "_INSTRUCTION_MAP", instructions)

    def _wrap(self, original: Callable[..., Any], begins: bool) -> Callable[..., Any]:
        """Wrap a method of a stage whose first argument names a micro-batch, and may begin it: its forward.

        A name may be used again after its backward.
        """
        recorder, stages = self._recorder, self._stages

        @functools.wraps(original)
        def run(owner: Any, *args: Any, **kwargs: Any) -> Any:
            name = args[0] if args else next(iter(kwargs.values()), None)
            stage = stages.setdefault(owner, _Stage())
            if begins:
                stage.count += 1
                stage.numbers[name] = stage.count
            recorder.micro_batch = stage.numbers.get(name, 0)
            try:
                return original(owner, *args, **kwargs)
            finally:
                recorder.micro_batch = 0

        return run
