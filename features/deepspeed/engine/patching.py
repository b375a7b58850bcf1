"""Patches DeepSpeed so that `deepspeed.initialize` builds InterleavedStage3, and undoes it."""

import functools
import gc
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, Literal

from ebbtide.features.deepspeed.engine.supported import check_engine, check_version, overlap_of
from ebbtide.interleave.engine.devices.opening import DeviceArgument
from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.options import (
    BudgetArgument,
    EngineOptions,
    MachineArgument,
    with_overlap_option,
)
from ebbtide.interleave.model.operations import Overlap

log = logging.getLogger("ebbtide")


# `DeepSpeedEngine._configure_optimizer` of DeepSpeed while it is replaced.
_original: Callable[..., Any] | None = None


def enable(
    policy: str = "adaptive",
    *,
    memory_budget: BudgetArgument | None = None,
    machine: MachineArgument | None = None,
    subgroup_params: int = EngineOptions.subgroup_params,
    threads: int | None = None,
    device: DeviceArgument | None = None,
    beside: bool = False,
    overlap: Literal["none", "forward", "auto"] = "none",
    storage: str | Path | Sequence[str | Path] | None = None,
    host_memory_budget: float | str | None = None,
) -> AbstractContextManager[object]:
    """Let `deepspeed.initialize` create engines whose optimizer follows a policy of ebbtide; call this before it.

    The configuration stays as it is (ZeRO stage 3, offload_optimizer to the cpu); its `ratio` has no effect.

    Args:
        policy: As for InterleavedAdamW, like `memory_budget`, `machine`, `threads` and `device`.
        subgroup_params: Maximum number of parameters whose state is moved and updated as one. DeepSpeed's
            sub_group_size, which determines the layout of checkpoints, does not change.
        beside: Allow that engines exist already; they stay as they are.
        overlap: `forward`, or `auto`, to update parameters under the next forward, as far as it does not gather them
            yet. Then read parameters outside of the model only in GatheredParameters, or after
            `engine.optimizer.synchronize()`.
        storage: A folder, or several, for state that host memory does not hold; see `StateAccess.commit`.
        host_memory_budget: With `storage`: bytes of host memory for state and buffers of ebbtide; by default most of
            what is free.

    Returns:
        A context manager that calls `disable` at its end. Existing engines stay as they are.

    Raises:
        EngineError: For a version of DeepSpeed that is not tested, for an option that is not valid, and if engines
            exist already. `deepspeed.initialize` raises it for a configuration that is not supported.
        PolicyError: If the policy is not valid.
    """
    check_version()
    policy = with_overlap_option(policy, overlap, "streamed", Overlap(forward=True))
    settings = EngineOptions.of_arguments(
        policy=policy,
        machine=machine,
        subgroup_params=subgroup_params,
        memory_budget=memory_budget,
        gradients="streamed",
        device=device,
        threads=threads,
        storage=storage,
        host_memory_budget=host_memory_budget,
        supported=Overlap(forward=overlap_of(policy) != "none"),
    )

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

    @functools.wraps(original)
    def configure_optimizer(engine: Any, *args: Any, **kwargs: Any) -> Any:
        check_engine(engine)
        # Imported before the name is replaced: InterleavedStage3 derives from the class of this name.
        from ebbtide.features.deepspeed.engine.stage3 import InterleavedStage3

        deepspeed_class = stage3.DeepSpeedZeroOptimizer_Stage3
        stage3.DeepSpeedZeroOptimizer_Stage3 = type("InterleavedStage3", (InterleavedStage3,), {"settings": settings})
        try:
            return original(engine, *args, **kwargs)
        finally:
            stage3.DeepSpeedZeroOptimizer_Stage3 = deepspeed_class

    global _original
    _original = original
    DeepSpeedEngine._configure_optimizer = configure_optimizer
    context = ExitStack()
    context.callback(disable)
    return context


def disable() -> None:
    """Let `deepspeed.initialize` create DeepSpeed's own optimizer from now on."""
    global _original
    if _original is not None:
        from deepspeed.runtime.engine import DeepSpeedEngine

        DeepSpeedEngine._configure_optimizer, _original = _original, None
