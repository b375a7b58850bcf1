"""Lets DeepSpeed's engines of a job follow the policy, where `enable` can."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ebbtide.errors import UserError
from ebbtide.features.run.driver.process import DrivenProcess
from ebbtide.interleave.deepspeed import enable

_STATIC = "twin-flow:0.5"


class DeepSpeedEngines:
    """The engines that the job's `deepspeed.initialize` has made."""

    def __init__(self, process: DrivenProcess) -> None:
        self._process = process
        self._engines: list[Any] = []
        self._reason: str | None = None
        self._is_enabled = False

    def initializing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return an `initialize` that enables the policy before the first engine."""

        def initialize(*args: Any, **kwargs: Any) -> Any:
            if not self._is_enabled and self._process.options.policy != "none":
                self._is_enabled = True
                self._enable()
            result = original(*args, **kwargs)
            self._watch(result[0])
            return result

        return initialize

    def params(self) -> list[torch.Tensor]:
        """Return the parameters of all engines, as this rank has them."""
        return [
            getattr(param, "ds_tensor", param)
            for engine in self._engines
            for param in engine.module.parameters()
        ]

    def log_ends(self) -> None:
        """Log the end of each engine."""
        for number, engine in enumerate(self._engines, 1):
            optimizer = engine.optimizer
            is_driven = hasattr(type(optimizer), "settings")
            plan = getattr(optimizer, "plan", None) if is_driven else None
            self._process.log.add(
                "end",
                optimizer=number,
                policy=self._process.options.policy if is_driven else None,
                steps=engine.global_steps if is_driven else 0,
                left=None if is_driven else self._reason or "torch's own ran",
                plan=plan and plan.counts(),
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
        self._engines.append(engine)
        process, step = self._process, engine.step

        def counted_step(*args: Any, **kwargs: Any) -> Any:
            result = step(*args, **kwargs)
            process.log.step = max(process.log.step, int(engine.global_steps))
            process.log.flush()
            process.end_after_steps(engine.global_steps)
            return result

        engine.step = counted_step
