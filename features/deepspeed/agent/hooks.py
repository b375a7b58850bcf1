"""Plugs the hooks of DeepSpeed into the agent."""

from __future__ import annotations

from typing import Callable

from ebbtide.profiler.agent.recorder import Recorder

from .phase_hooks import DeepSpeedHooks
from .zero_optimizer import ZeroReader

READER = ZeroReader()


def install(recorder: Recorder) -> Callable[[], None]:
    """Record DeepSpeed's phases; return a function that stops that."""
    return DeepSpeedHooks(recorder, recorder.torch).remove
