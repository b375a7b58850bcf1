"""Activations of a model's layers, kept, recomputed or offloaded as orders say."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from ebbtide.features.layers.engine.layer_pass import LayerPass
from ebbtide.features.layers.engine.measurement import PassMeasurement
from ebbtide.features.layers.engine.memory import LayerMemoryCount
from ebbtide.features.layers.engine.model_layers import (
    LayerForward,
    storages_of,
    tensors_in,
)
from ebbtide.features.layers.engine.orders import LayerOrders
from ebbtide.features.layers.engine.recomputation import Recomputation, RecomputedLayers
from ebbtide.features.layers.engine.transfers import StorageTransfers

_MAY_RECOMPUTE = ("auto", "recompute", "recompute-offload")


class Activations(RecomputedLayers):
    """The activations of a model's layers.

    `option` is the choice for all of them, or `auto`.
    """

    def __init__(self, model: torch.nn.Module, option: str, on_difference: str) -> None:
        super().__init__(on_difference)
        self._model = model
        self.option = option
        self._pass: LayerPass | None = None
        # Those that something saved belongs to.
        self._passes: weakref.WeakSet[LayerPass] = weakref.WeakSet()

    def begin_pass(
        self,
        transfers: StorageTransfers,
        orders: LayerOrders,
        order: Sequence[LayerForward],
        end: Callable[[PassMeasurement | None], None],
        measurement: PassMeasurement | None,
        is_first: bool,
    ) -> None:
        """Begin a pass with its orders.

        `is_first`: no pass of its kind was measured, and caches may fill.
        """
        self._pass = None
        if orders.keeps_all:
            # It waits for no copy later: one of a pass that has no backward would hold
            # its memory.
            transfers.wait("d2h", lambda _: True)
            return
        is_trial = (
            measurement is not None and not is_first and self.option in _MAY_RECOMPUTE
        )
        own = storages_of(self._model)
        self._pass = LayerPass(
            transfers, orders, order, end, own, measurement, is_trial
        )
        self._passes.add(self._pass)

    def run(
        self,
        layer: LayerForward,
        number: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Compute a layer's forward as the orders of the pass say."""
        one = self._pass
        if one is None:
            return layer.compute(args, kwargs)
        # It shows whether a layer can be computed again.
        is_trial = one.is_trial and layer not in (self.tried | self.reasons)
        one.begin_layer(number, storages_of(layer.module))
        if one.measurement is not None:
            one.measurement.take_inputs(number, tensors_in(args, kwargs))
        if is_trial or number in one.orders.recomputed:
            output = Recomputation(self, one, layer, number, is_trial).run(args, kwargs)
        else:
            with saved_tensors_hooks(one.save, one.load):
                output = layer.compute(args, kwargs)
        one.end_layer(number, tensors_in(output))
        return output

    def evict(self) -> bool:
        """Offload what layers keep that do not compute. Return whether there is any."""
        return any(one.evict(one is self._pass) for one in self._passes)


class KeptClaim:
    """The memory that all layers keep in a pass, claimed until the backward of the
    first one, or the end of its graph.

    Hooks of the first layer's saved tensors would know more, and would cost more than 1
    % of a short step.
    """

    def __init__(self, memory: LayerMemoryCount, nbytes: int) -> None:
        self._memory = memory
        self._nbytes = 0
        memory.claim(nbytes)
        self._nbytes = nbytes

    def release(self, *_: Any) -> None:
        self._memory.unclaim(self._nbytes)
        self._nbytes = 0

    def __del__(self) -> None:
        self.release()

    def attach(self, outputs: Sequence[torch.Tensor]) -> None:
        """Let the graph of a layer's outputs hold this."""
        for output in outputs:
            if output.grad_fn is not None:
                output.grad_fn.register_prehook(self.release)
                return
