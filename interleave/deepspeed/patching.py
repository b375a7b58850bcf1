"""Patches DeepSpeed so that `deepspeed.initialize` builds InterleavedStage3, and undoes it."""

from __future__ import annotations

import functools
import gc
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from ebbtide.interleave.deepspeed.settings import Settings
from ebbtide.interleave.deepspeed.supported import check_engine, check_version, overlap_of
from ebbtide.interleave.engine.adaptive.budget import Budget
from ebbtide.interleave.engine.checks import check_options, with_overlap_option
from ebbtide.interleave.engine.devices.device import Device
from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.runtime.storage.options import storage_options
from ebbtide.machines.machine import Machine

log = logging.getLogger("ebbtide")


@dataclass
class _Patch:
    """The patch of DeepSpeed.

    Attributes:
        original: `DeepSpeedEngine._configure_optimizer` of DeepSpeed while it is replaced; else None.
    """

    original: Callable[..., Any] | None = None


_patch = _Patch()


class Enabled:
    """The result of `enable`: as a context manager it calls `disable` at its end. Existing engines stay as they are."""

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
    overlap: Literal["none", "forward"] = "none",
    storage: str | Path | Sequence[str | Path] | None = None,
    host_memory_budget: float | None = None,
) -> Enabled:
    """Let `deepspeed.initialize` create engines whose optimizer follows a policy of ebbtide; call this before it.

    The configuration stays as it is (ZeRO stage 3, offload_optimizer to the cpu); its `ratio` has no effect.

    Args:
        policy: As for InterleavedAdamW.
        memory_budget: As for InterleavedAdamW.
        machine: As for InterleavedAdamW.
        subgroup_params: Maximum number of parameters whose state is moved and updated as one. DeepSpeed's
            sub_group_size, which determines the layout of checkpoints, does not change.
        threads: As for InterleavedAdamW.
        device: As for InterleavedAdamW.
        beside: Allow that engines exist already; they stay as they are.
        overlap: `forward` to update parameters under the next forward, as far as it does not gather them yet. Then
            read parameters outside of the model only in GatheredParameters, or after `engine.optimizer.synchronize()`.
        storage: A folder, or several, for state that host memory does not hold; see `StateAccess.commit`.
        host_memory_budget: With `storage`: bytes of host memory for state and buffers of ebbtide; by default most of
            what is free.

    Returns:
        A context manager that calls `disable` at its end.

    Raises:
        EngineError: For a version of DeepSpeed that is not tested, for an option that is not valid, and if engines
            exist already. `deepspeed.initialize` raises it for a configuration that is not supported.
        PolicyError: If the policy is not valid.
    """
    check_version()
    check_options("streamed", subgroup_params, threads, memory_budget)
    policy = with_overlap_option(policy, overlap, "streamed", has_model=True)
    overlap_of(policy)
    # Each engine opens files of its own.
    storage_options(storage, host_memory_budget)

    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.superoffload import superoffload_stage3  # noqa: F401  derives from what is replaced below
    from deepspeed.runtime.zero import stage3

    types = (type(instance) for instance in gc.get_objects())
    stage3_types = (kind for kind in types if issubclass(kind, stage3.DeepSpeedZeroOptimizer_Stage3))
    if not beside and not all(hasattr(kind, "settings") for kind in stage3_types):
        raise EngineError(
            "there is an engine of ZeRO stage 3 already, which cannot be driven any more: call enable() before "
            "deepspeed.initialize(), or enable(beside=True) for the engines created from now on"
        )
    disable()
    original = DeepSpeedEngine._configure_optimizer
    settings = Settings(policy, memory_budget, machine, subgroup_params, threads, device, storage, host_memory_budget)

    @functools.wraps(original)
    def configure_optimizer(engine: Any, *args: Any, **kwargs: Any) -> Any:
        check_engine(engine)
        # Imported before the name is replaced: InterleavedStage3 derives from the class of this name.
        from ebbtide.interleave.deepspeed.stage3 import InterleavedStage3

        deepspeed_class = stage3.DeepSpeedZeroOptimizer_Stage3
        stage3.DeepSpeedZeroOptimizer_Stage3 = type("InterleavedStage3", (InterleavedStage3,), {"settings": settings})
        try:
            return original(engine, *args, **kwargs)
        finally:
            stage3.DeepSpeedZeroOptimizer_Stage3 = deepspeed_class

    _patch.original = original
    DeepSpeedEngine._configure_optimizer = configure_optimizer
    return Enabled()


def disable() -> None:
    """Let `deepspeed.initialize` create DeepSpeed's own optimizer from now on."""
    if _patch.original is not None:
        from deepspeed.runtime.engine import DeepSpeedEngine

        DeepSpeedEngine._configure_optimizer = _patch.original
        _patch.original = None
