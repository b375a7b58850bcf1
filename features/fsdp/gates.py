"""Gates before the gathers of `fully_shard`.

Gathers then wait for shards that a step still writes.
"""

import inspect
import sys
from typing import Any

import torch

from ebbtide.features.overlap.gates import MethodGate, Wait
from ebbtide.interleave.engine.errors import EngineError


class ShardedGates:
    """Gates on the `unshard` of the groups of `fully_shard`.

    The hook of these groups gathers and prefetches before any other. Gathers on CUDA
    copy the shards on a stream of their own; the wait ends when the host has seen the
    event behind the upload. Raises EngineError if torch has other groups than those
    known here.
    """

    title = "of fully_shard"

    def __init__(self, model: torch.nn.Module, wait: Wait) -> None:
        groups = _parameter_groups(model)
        self.params = {param for group in groups for param in _shards(group)}
        self._gates = [
            MethodGate(
                group, "unshard", lambda *_, group=group, **__: wait(_shards(group))
            )
            for group in groups
        ]

    def remove(self) -> None:
        for gate in self._gates:
            gate.remove()


def _shards(group: Any) -> list[torch.Tensor]:
    # Looked up at each gather: the first forward may replace parameters that the job
    # has assigned.
    return [fsdp_param.sharded_param for fsdp_param in group.fsdp_params]


def _parameter_groups(model: torch.nn.Module) -> list[Any]:
    """Return the parameter groups of all modules in a module. Raises EngineError for an
    unknown version of them."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return []
    if any(
        isinstance(module, fsdp.FullyShardedDataParallel) for module in model.modules()
    ):
        raise EngineError(
            "overlap is not supported with FullyShardedDataParallel (FSDP1): shard "
            "with fully_shard, or leave "
            "out overlap and model"
        )
    modules = [
        module for module in model.modules() if isinstance(module, fsdp.FSDPModule)
    ]
    try:
        # One state may belong to several modules.
        states = {
            id(state): state
            for state in (module._get_fsdp_state() for module in modules)
        }.values()
        groups = [group for state in states for group in _groups_of(state)]
        is_known = all(
            list(inspect.signature(type(group).unshard).parameters)
            == ["self", "async_op"]
            and all(isinstance(param, torch.Tensor) for param in _shards(group))
            for group in groups
        )
    except AttributeError:
        is_known = False
    if not is_known:
        raise EngineError(
            f"overlap is not supported with fully_shard of torch {torch.__version__}, "
            "whose parameter groups are not "
            "known here: leave out overlap and model"
        )
    return groups


def _groups_of(state: Any) -> list[Any]:
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    # Older versions of torch have at most one.
    return [group for group in (state._fsdp_param_group,) if group is not None]
