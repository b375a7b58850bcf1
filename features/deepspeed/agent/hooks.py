"""Plugs the hooks of DeepSpeed into the agent."""

from __future__ import annotations

from typing import Any

from ebbtide.profiler.agent.recorder import Recorder

from .phase_hooks import DeepSpeedHooks
from .zero_optimizer import ZeroReader

READER = ZeroReader()


def attach(recorder: Recorder, torch: Any) -> None:
    """Record DeepSpeed's phases until the recorder is closed."""
    recorder.on_close.append(DeepSpeedHooks(recorder, torch).remove)
