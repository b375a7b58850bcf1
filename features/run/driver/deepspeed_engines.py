"""Lets DeepSpeed's engines of a job follow the policy, where `enable` can."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ebbtide.errors import UserError
from ebbtide.features.run.driver.figures import RunFigures
from ebbtide.features.run.driver.process import DrivenProcess
from ebbtide.interleave.deepspeed import enable

_STATIC = "twin-flow:0.5"


class DeepSpeedEngines:
    """The engines of DeepSpeed that the job has made."""

    def __init__(self, process: DrivenProcess) -> None:
        self._process = process
        self._engines: dict[Any, RunFigures] = {}
        self._reason: str | None = None
        self._is_enabled = False

    def making(self, original: Callable[..., None]) -> Callable[..., None]:
        """Return the `__init__` of engines that enables the policy before the first."""

        def init(engine: Any, *args: Any, **kwargs: Any) -> None:
            if not self._is_enabled and self._process.options.policy != "none":
                self._is_enabled = True
                self._enable()
            original(engine, *args, **kwargs)
            self._watch(engine)

        return init

    def params(self) -> list[torch.Tensor]:
        """Return the parameters of all engines, as this rank has them."""
        return [
            getattr(param, "ds_tensor", param)
            for engine in self._engines
            for param in engine.module.parameters()
        ]

    def log_ends(self) -> None:
        """Log the end of each engine."""
        policy = self._process.options.policy
        for number, (engine, figures) in enumerate(self._engines.items(), 1):
            is_driven = _is_driven(engine)
            figures.end()
            self._process.log.add(
                "end",
                optimizer=number,
                policy=policy if is_driven else None,
                steps=engine.global_steps if is_driven else 0,
                left=None if is_driven else self._reason or "DeepSpeed's own ran",
                **figures.result,
            )

    def _enable(self) -> None:
        options = self._process.options
        policy = _STATIC if options.policy == "static" else options.policy
        try:
            enable(
                policy,
                memory_budget=options.memory_budget,
                machine=options.machine,
                on_unsupported=self._leave,
            )
        except UserError as error:
            self._leave(str(error))

    def _leave(self, reason: str) -> None:
        self._reason = reason
        self._process.note(f"DeepSpeed's own optimizer stays: {reason}")

    def _watch(self, engine: Any) -> None:
        """Count the engine's steps."""
        figures = self._engines[engine] = RunFigures()
        process, step = self._process, engine.step

        def counted_step(*args: Any, **kwargs: Any) -> Any:
            result = step(*args, **kwargs)
            if _is_driven(engine):
                figures.add(engine.optimizer)
            process.log.step = max(process.log.step, int(engine.global_steps))
            process.log.flush()
            process.end_after_steps(engine.global_steps)
            return result

        engine.step = counted_step


def _is_driven(engine: Any) -> bool:
    return hasattr(type(engine.optimizer), "settings")
