"""DistributedDataParallel, which reads parameters itself at the end of `join()`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.gates.method_gate import MethodGate


class ReplicaGates:
    """Gates before the broadcast of all parameters with which DistributedDataParallel ends `join()`.

    Args:
        model: The module; one that is DistributedDataParallel, contains it, or is contained in it.
        finish: Waits until late operations have ended. What is written afterwards counts as a change by the job.

    Raises:
        EngineError: DistributedDataParallel converts parameters to another dtype.
    """

    def __init__(self, model: torch.nn.Module, finish: Callable[[], None]) -> None:
        if any(hasattr(param, "_mp_param") for param in model.parameters()):
            raise EngineError(
                "overlap is not supported with mixed_precision of DistributedDataParallel, which converts all "
                "parameters before the forward: use autocast, or leave out overlap and model"
            )
        self._finish = finish
        self._gates: dict[int, MethodGate] = {}
        self._handle: RemovableHandle | None = None
        replicas = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
        for replica in replicas:
            self._add(replica)
        if not replicas and torch.distributed.is_available() and torch.distributed.is_initialized():
            # torch.compile must not trace it, and cannot mark a method so.
            hook = torch._disable_dynamo(lambda *_: self._add_active())
            self._handle = model.register_forward_pre_hook(hook)

    @property
    def hook_ids(self) -> set[int]:
        """The ids of hooks of the model."""
        return set() if self._handle is None else {self._handle.id}

    def remove(self) -> None:
        """Remove the gates."""
        if self._handle is not None:
            self._handle.remove()
        for gate in self._gates.values():
            gate.remove()

    def _add(self, replica: DistributedDataParallel) -> None:
        finish = self._finish
        self._gates[id(replica)] = MethodGate(replica, "_sync_final_model", lambda *_, **__: finish())

    def _add_active(self) -> None:
        """Add the module that contains the model, while its forward runs."""
        replica = DistributedDataParallel._get_active_ddp_module()
        if replica is not None and id(replica) not in self._gates:
            self._add(replica)
