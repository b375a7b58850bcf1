"""One pass: a forward through the layers and its backwards.

Orders move the activations in it.
"""

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

import torch

from ebbtide.features.layers.engine.measurement import PassMeasurement
from ebbtide.features.layers.engine.model_layers import LayerForward
from ebbtide.features.layers.engine.orders import LayerOrders
from ebbtide.features.layers.engine.saved_tensors import PackedTensor, is_plain
from ebbtide.features.layers.engine.transfers import SavedStorage, StorageTransfers
from ebbtide.interleave.engine.devices.device import Mark
from ebbtide.interleave.engine.errors import DeviceMemoryError
from ebbtide.interleave.engine.forks import fork_lock


class LayerPass:
    """The activations of one pass.

    The forward calls `begin_layer`, `save` and `end_layer`; the backward calls `load`
    for each saved tensor, by which it is seen in which layer it is. Saved tensors hold
    this object, and it holds them weakly: what autograd releases is released."""

    def __init__(
        self,
        transfers: StorageTransfers,
        orders: LayerOrders,
        layers: Sequence[LayerForward],
        end: Callable[[PassMeasurement | None], None],
        own: Collection[int],
        measurement: PassMeasurement | None,
        is_trial: bool = False,
    ) -> None:
        """Initialize.

        `is_trial`: layers are computed again before what they have saved comes back.
        """
        self.orders = orders
        self.is_trial = is_trial
        self._transfers = transfers
        self._torch_device = transfers.device.torch_device
        self._layers = layers
        self._end = end
        self._own = own
        # The same of the layer that computes now, which may have gathered them.
        self.own_of_layer: Collection[int] = ()
        self._storages: weakref.WeakValueDictionary[int, SavedStorage] = (
            weakref.WeakValueDictionary()
        )
        self._of_layer: dict[int, weakref.WeakSet[SavedStorage]] = {}
        # Saved outputs of the last layer: they count for the next one, whose backward
        # needs them first.
        self._outputs: weakref.WeakSet[SavedStorage] = weakref.WeakSet()
        self._saved = 0
        self.last_layer = -1
        # The layer whose forward runs.
        self._forward_of: int | None = None
        # The layer whose backward runs.
        self._backward_of: int | None = None
        self._lock = fork_lock()
        self.measurement = measurement

    def begin_layer(self, layer: int, own: Collection[int]) -> None:
        transfers, orders = self._transfers, self.orders
        if self.measurement is not None:
            self.measurement.begin(False, layer)
        transfers.release_passed()
        if orders.copied is None:
            transfers.wait("d2h", lambda _: True)
        elif awaited := orders.awaited.get(layer):
            transfers.wait("d2h", lambda one: one.layer in awaited)
        self.own_of_layer, self._saved, self.last_layer = own, 0, layer
        self._forward_of = layer
        self._of_layer[layer] = weakref.WeakSet()
        for storage in self._outputs:
            self._assign(storage, layer)
        self._outputs.clear()

    def save(self, tensor: torch.Tensor) -> PackedTensor:
        """Return what autograd holds in place of a tensor."""
        self._saved += 1
        layer = self.last_layer
        storage = self._moved_storage(tensor)
        if storage is None:
            return PackedTensor(tensor, None, layer)
        saved = self._find(storage)
        if saved is None:
            self._count(storage, layer)
            saved = self._storages[storage._cdata] = SavedStorage(
                storage, (layer, self._saved)
            )
        self._assign(saved, layer)
        if saved.stays:
            saved.hold()
            saved.keeper = layer if saved.keeper is None else saved.keeper
        return PackedTensor(tensor, saved, layer)

    def _find(self, storage: torch.UntypedStorage) -> SavedStorage | None:
        saved = self._storages.get(storage._cdata)
        # Another storage may have had the same key.
        return saved if saved is not None and saved.is_in(storage) else None

    def counted(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor that recomputation saves, after counting its memory."""
        if (storage := self._moved_storage(tensor)) is not None:
            self._count(storage, self._backward_of or 0)
        return tensor

    def _moved_storage(self, tensor: torch.Tensor) -> torch.UntypedStorage | None:
        """Return the storage of a tensor on the device.

        Return None for parameters, and for what is more than its bytes.
        """
        if tensor.device != self._torch_device or not is_plain(tensor):
            return None
        storage = tensor.untyped_storage()
        return None if self.is_own(storage._cdata) else storage

    def is_own(self, key: int) -> bool:
        """Return whether a storage belongs to a parameter or a buffer."""
        return key in self._own or key in self.own_of_layer

    def keep(self, layer: int) -> None:
        """Offload a layer's activations, which were to be computed again."""
        self.orders = self.orders.without_recomputation({layer})
        for storage in self._of_layer[layer]:
            self._assign(storage, layer)

    def record(self) -> Mark:
        return self._transfers.device.record("job")

    def wait(self, marks: Sequence[Mark]) -> None:
        self._transfers.device.wait("job", marks)

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Return a context whose time is not measured."""
        waits = self._transfers.waits
        start, count = self.record(), len(waits)
        yield
        waits[count:] = [start, self.record()]

    def _count(self, storage: torch.UntypedStorage, layer: int) -> None:
        try:
            self._transfers.count(storage)
        except DeviceMemoryError as error:
            raise DeviceMemoryError(
                f"layer {self._layers[layer].name}: {error}"
            ) from error

    def evict(self, is_last: bool) -> bool:
        """Offload what layers keep that do not compute, for plans that have counted too
        little, and return whether there is any.

        `is_last`: no other forward has begun since."""
        layer = (
            self.last_layer
            if self._backward_of is None and is_last
            else self._backward_of
        )
        others = chain.from_iterable(
            storages for other, storages in self._of_layer.items() if other != layer
        )
        kept = [
            one
            for one in others
            if one.stays
            and one not in self._outputs
            and one.first not in self.orders.left
        ]
        for one in kept:
            one.stays = False
        self._transfers.down([one for one in kept if one.host is None])
        return bool(kept)

    def _assign(self, storage: SavedStorage, layer: int) -> None:
        """Let a storage belong to a later layer, since this one uses it before the
        layers that have saved it."""
        if (
            storage.layer != layer
            and (former := self._of_layer.get(storage.layer)) is not None
        ):
            former.discard(storage)
        storage.layer = layer
        storage.stays = (
            not self.orders.is_copied(layer) or storage.first in self.orders.left
        )
        self._of_layer[layer].add(storage)

    def end_layer(self, layer: int, outputs: Sequence[torch.Tensor]) -> None:
        self._forward_of = None
        if self.measurement is not None:
            self.measurement.end()
            self.measurement.look(
                one for other in range(layer) for one in self._of_layer.get(other, ())
            )
        for tensor in outputs:
            if (
                is_plain(tensor)
                and (storage := self._find(tensor.untyped_storage())) is not None
            ):
                self._outputs.add(storage)
        if self.orders.is_copied(layer):
            own = self._of_layer[layer].difference(self._outputs)
            self._transfers.down(
                [one for one in own if one.host is None and not one.stays]
            )

    def load(self, saved: PackedTensor) -> torch.Tensor:
        """Return a saved tensor for the backward. Raises EngineError if the job has
        modified it."""
        with self._lock:
            saved.check(self._layers[saved.layer].name)
            if saved.layer not in (self._backward_of, self._forward_of):
                self._begin_backward(saved.layer)
            storage = saved.storage
            if storage is not None and storage.hold() is None:
                self._bring_back([storage], saved.layer)
            tensor = saved.get()
            if storage is not None:
                self._transfers.use(storage, tensor)
            return tensor

    def share(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor that was computed again, for whatever stream of the job uses
        it."""
        self._transfers.device.share(tensor)
        return tensor

    def _begin_backward(self, layer: int) -> None:
        before = self._backward_of
        if before is None or layer > before:
            # A backward begins; after one that has failed, too.
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
            self._outputs.clear()
        if self.measurement is not None:
            self.measurement.begin(True, layer)
            self._transfers.wait("d2h", lambda _: True)
            self.measurement.end_forward(self._of_layer)
        self._backward_of = layer
        self._release_after(layer)
        if not self.is_trial:
            self._bring_back(self._of_layer.get(layer, ()), layer)
        for later, other in self.orders.returned:
            if other < layer <= later - 1 and not self._transfers.prefetch(
                self._of_layer.get(other, ())
            ):
                break

    def _bring_back(self, storages: Collection[SavedStorage], layer: int) -> None:
        self._transfers.bring_back(
            storages, f"backward of layer {self._layers[layer].name}"
        )

    def _release_after(self, layer: int) -> None:
        """Release on the device what layers have used whose backward has ended."""
        self._transfers.wait("d2h", lambda one: one.layer > layer)
        self._transfers.wait("h2d", lambda one: one.layer > layer)
        for other, storages in self._of_layer.items():
            if other > layer:
                for one in storages:
                    if one.keeper is None or one.keeper > layer:
                        one.release()

    def _end_backward(self) -> None:
        with self._lock:
            if self.measurement is not None:
                self.measurement.end()
            self._release_after(-1)
            self._backward_of = None
        self._end(self.measurement)
