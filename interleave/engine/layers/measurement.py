"""Measures a pass through layers: times, bytes, and whether a layer can be computed again."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from ebbtide.interleave.engine.devices.device import Mark, Streams
from ebbtide.interleave.engine.layers.orders import LEAST_S, MeasuredLayer, PassTimes
from ebbtide.interleave.engine.layers.saved_tensors import TensorVersion
from ebbtide.interleave.engine.layers.transfers import SavedStorage


class PassMeasurement:
    """Marks before and after the compute of each layer, in the forward and in the backward, and its bytes.

    Attributes:
        saved_bytes: By layer, of what the job does not hold itself; empty before the backward.
        left: What the job holds itself: the layer and the number of the saved tensor. A copy would free nothing.
        left_bytes: Bytes of that.
    """

    def __init__(self, device: Streams) -> None:
        self._device = device
        self._marks: dict[tuple[bool, int], list[Mark]] = {}
        self._open: list[Mark] = []
        # Behind the last compute of a layer, and before the first backward.
        self._ended: Mark | None = None
        self._turned: Mark | None = None
        self._inputs: dict[int, tuple[int, list[TensorVersion]]] = {}
        self._with_effects: set[int] = set()
        self.saved_bytes: dict[int, int] = {}
        self.left: set[tuple[int, int]] = set()
        self.left_bytes = 0

    def begin(self, is_backward: bool, layer: int) -> None:
        self._open = self._marks[is_backward, layer] = [self._device.record("job")]

    def end(self) -> None:
        self._ended = self._device.record("job")
        self._open.append(self._ended)
        self._open = []

    def turn(self) -> None:
        """Mark the begin of the backward."""
        self._turned = self._turned or self._device.record("job")

    def outside(self) -> PassTimes:
        """Return the times outside of layers, of a pass before the one that begins now."""
        now = self._device.record("job")
        last = max(layer for is_backward, layer in self._marks if not is_backward)
        forward = self._marks[False, last]
        if self._turned is None or self._ended is None or len(forward) < 2:
            return PassTimes()
        now.synchronize()
        return PassTimes(max(0.0, self._turned.time_s - forward[1].time_s), max(0.0, now.time_s - self._ended.time_s))

    @contextmanager
    def inputs(self, layer: int, module: torch.nn.Module, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """Return a context for the forward of a layer, which sees what computing it again would do."""
        storages = {storage._cdata: storage.nbytes() for storage in (one.untyped_storage() for one in tensors)}
        self._inputs[layer] = sum(storages.values()), [TensorVersion(tensor) for tensor in tensors]
        buffers = [TensorVersion(buffer) for buffer in module.buffers()]
        yield
        if any(buffer.is_changed for buffer in buffers):
            self._with_effects.add(layer)

    def look(self, storages: Iterable[SavedStorage]) -> None:
        """See which storages of layers whose copies have ended, and which the caller of layers has left, still live."""
        self.left |= {one.first for one in storages if one.is_of_others}

    def end_forward(self, of_layer: Mapping[int, Collection[SavedStorage]]) -> None:
        """Take what layers have saved when their backward begins, once."""
        if self.saved_bytes:
            return
        for layer, storages in of_layer.items():
            self.look(storages)
            # The last layer's output was never copied.
            left = {one for one in storages if one.first in self.left or one.host is None}
            self.left |= {one.first for one in left}
            self.left_bytes += sum(one.nbytes for one in left)
            self.saved_bytes[layer] = sum(one.nbytes for one in storages if one not in left)
        self._with_effects |= {
            layer for layer, (_, tensors) in self._inputs.items() if any(one.is_changed for one in tensors)
        }

    def layers(self, names: Sequence[str], weights: Sequence[tuple[int, int]] = ()) -> list[MeasuredLayer]:
        """Return the layers; `weights`: the bytes of the streamed weights of each, and of their gradients."""
        return [
            MeasuredLayer(
                name,
                self._seconds(False, layer),
                self._seconds(True, layer),
                self.saved_bytes.get(layer, 0),
                self._inputs.get(layer, (0, []))[0],
                layer not in self._with_effects,
                *(weights[layer] if layer < len(weights) else (0, 0)),
            )
            for layer, name in enumerate(names)
        ]

    def _seconds(self, is_backward: bool, layer: int) -> float:
        marks = self._marks.get((is_backward, layer), [])
        if len(marks) < 2:
            return LEAST_S
        marks[1].synchronize()
        return max(LEAST_S, marks[1].time_s - marks[0].time_s)
