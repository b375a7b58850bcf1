"""Patches DeepSpeed so that `deepspeed.initialize` builds InterleavedStage3, and undoes
the patches."""

import functools
import gc
import inspect
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Literal, Unpack

from ebbtide.features.deepspeed.engine.supported import (
    check_engine,
    check_policy,
    check_version,
)
from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.options import (
    OptimizerOptions,
    SharedArguments,
    shows_options,
)
from ebbtide.interleave.model.operations import Overlap
from ebbtide.interleave.policies import Policy

log = logging.getLogger("ebbtide")


# `DeepSpeedEngine._configure_optimizer` of DeepSpeed while it is replaced.
_original: Callable[..., Any] | None = None


class EnableArguments(SharedArguments, total=False):
    """The options of `enable` as callers write them."""

    overlap: Literal["none", "forward", "auto"]


@shows_options(EnableArguments)
def enable(
    policy: Policy | str = "adaptive",
    *,
    beside: bool = False,
    on_unsupported: Callable[[str], object] | None = None,
    **options: Unpack[EnableArguments],
) -> AbstractContextManager[object]:
    """Let `deepspeed.initialize` create engines that follow a policy of ebbtide.

    Their optimizer follows it. Call this before `deepspeed.initialize`.

    The configuration stays as it is (ZeRO stage 3, offload_optimizer to the cpu); its
    `ratio` has no effect.

    Args:
        policy: As for InterleavedAdamW.
        beside: Allow that engines exist already; they stay as they are.
        on_unsupported: Called with the reason where the configuration of an engine is
            not supported: DeepSpeed's own optimizer stays then.
        options: `machine`, `subgroup_params`, `memory_budget`, `device`, `threads`,
            `overlap`, `storage` and `host_memory_budget`, as OptimizerOptions says.
            DeepSpeed's sub_group_size, which determines the layout of checkpoints, does
            not change. Updates run under the next forward as far as it does not gather
            their parameters yet: then read them outside of the model only in
            GatheredParameters, or after `engine.optimizer.synchronize()`. For `storage`
            see `StateAccess.commit`.

    Returns:
        A context manager that calls `disable` at its end. Existing engines stay as they
            are.

    Raises:
        TypeError: For an option of another name.
        EngineError: For a version of DeepSpeed that is not tested, for an option that
            is not valid, and if engines exist already. `deepspeed.initialize` raises it
            for a configuration that is not supported.
        PolicyError: If the policy is not valid.
    """
    inspect.signature(enable).bind(
        policy, beside=beside, on_unsupported=on_unsupported, **options
    )
    check_version()
    settings = OptimizerOptions.of_arguments(
        Overlap(forward=True), policy=policy, gradients="streamed", **options
    )
    check_policy(settings.policy)

    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.superoffload import superoffload_stage3  # noqa: F401  derives from what is replaced below
    from deepspeed.runtime.zero import stage3

    types = (type(instance) for instance in gc.get_objects())
    stage3_types = (
        kind for kind in types if issubclass(kind, stage3.DeepSpeedZeroOptimizer_Stage3)
    )
    if not beside and not all(hasattr(kind, "settings") for kind in stage3_types):
        raise EngineError(
            "there is an engine of ZeRO stage 3 already, which cannot be driven any "
            "more: call enable() before "
            "deepspeed.initialize(), or enable(beside=True) for the engines created "
            "from now on"
        )
    disable()
    original = DeepSpeedEngine._configure_optimizer

    @functools.wraps(original)
    def configure_optimizer(engine: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            check_engine(engine)
        except EngineError as error:
            if on_unsupported is None:
                raise
            on_unsupported(str(error))
            return original(engine, *args, **kwargs)
        # Imported before the name is replaced: InterleavedStage3 derives from the class
        # of this name.
        from ebbtide.features.deepspeed.engine.stage3 import InterleavedStage3

        deepspeed_class = stage3.DeepSpeedZeroOptimizer_Stage3
        stage3.DeepSpeedZeroOptimizer_Stage3 = type(
            "InterleavedStage3", (InterleavedStage3,), {"settings": settings}
        )
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
