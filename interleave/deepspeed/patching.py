"""Puts our optimizer in the place of ZeRO stage 3's, and takes it out again."""

from __future__ import annotations

import functools
import gc
import logging
from types import TracebackType
from typing import Any

from ebbtide.interleave.deepspeed.settings import Settings
from ebbtide.interleave.deepspeed.supported import check_engine, check_version
from ebbtide.interleave.engine.adaptive.planner import Budget
from ebbtide.interleave.engine.checks import check_options
from ebbtide.interleave.engine.devices.device import Device
from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.policies import parse
from ebbtide.machines.machine import Machine

log = logging.getLogger("ebbtide")

# DeepSpeed's own `_configure_optimizer`, while ours stands in for it.
_original: list[Any] = []


class Enabled:
    """`with enable(...):` takes our optimizer out again at its end; those that were made stay."""

    def __enter__(self) -> Enabled:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        disable()


def enable(
    policy: str = "adaptive",
    *,
    memory_budget: Budget | None = None,
    machine: Machine | None = None,
    subgroup_params: int = Settings.subgroup_params,
    threads: int | None = None,
    device: Device | None = None,
    beside: bool = False,
) -> Enabled:
    """From now on `deepspeed.initialize` makes engines whose optimizer follows a policy of ours; call it before. The
    configuration stays as it is (ZeRO stage 3, offload_optimizer to the cpu); its `ratio` does not count.

    policy, memory_budget, machine, threads, device: as InterleavedAdamW takes them. subgroup_params: how much state
    moves as one, at most; DeepSpeed's sub_group_size, by which checkpoints are laid out, stays what it is.
    beside: there are engines already, which stay as they are.

    Raises EngineError for a version of DeepSpeed that this was not tried with and where there are engines already;
    PolicyError for a policy that cannot be. `deepspeed.initialize` raises EngineError for a
    configuration that this cannot drive.
    """
    check_version()
    check_options("streamed", subgroup_params, threads, memory_budget)
    parse(policy)

    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.superoffload import superoffload_stage3  # noqa: F401  derives from what is replaced below
    from deepspeed.runtime.zero import stage3

    made = (type(found) for found in gc.get_objects())
    theirs = (kind for kind in made if issubclass(kind, stage3.DeepSpeedZeroOptimizer_Stage3))
    if not beside and not all(hasattr(kind, "settings") for kind in theirs):
        raise EngineError(
            "there is an engine of ZeRO stage 3 already, which cannot be driven any more: call enable() before "
            "deepspeed.initialize(), or enable(beside=True) for the engines to come"
        )
    disable()
    original = DeepSpeedEngine._configure_optimizer
    settings = Settings(policy, memory_budget, machine, subgroup_params, threads, device)

    @functools.wraps(original)
    def configure_optimizer(engine: Any, *args: Any, **kwargs: Any) -> Any:
        check_engine(engine)
        # Before the name is bound: it derives from what the name stands for.
        from ebbtide.interleave.deepspeed.stage3 import InterleavedStage3

        theirs = stage3.DeepSpeedZeroOptimizer_Stage3
        stage3.DeepSpeedZeroOptimizer_Stage3 = type("InterleavedStage3", (InterleavedStage3,), {"settings": settings})
        try:
            return original(engine, *args, **kwargs)
        finally:
            stage3.DeepSpeedZeroOptimizer_Stage3 = theirs

    _original.append(original)
    DeepSpeedEngine._configure_optimizer = configure_optimizer
    return Enabled()


def disable() -> None:
    """From now on `deepspeed.initialize` makes DeepSpeed's own optimizer."""
    if _original:
        from deepspeed.runtime.engine import DeepSpeedEngine

        DeepSpeedEngine._configure_optimizer = _original.pop()
