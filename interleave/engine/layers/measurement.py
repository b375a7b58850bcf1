"""What a pass shows of its layers: times, bytes, and whether a layer can be computed again."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from ebbtide.interleave.engine.devices.device import Mark, Streams
from ebbtide.interleave.engine.layers.model_layers import storage_bytes
from ebbtide.interleave.engine.layers.orders import MeasuredLayer
from ebbtide.interleave.engine.layers.saved_tensors import TensorVersion

# No time is 0, so that plans are of this job.
_LEAST_S = 1e-9


class PassMeasurement:
    """Marks before and after the compute of each layer, in the forward and in the backward, and its bytes.

    Attributes:
        saved_bytes: By layer; None before the backward.
    """

    def __init__(self, device: Streams) -> None:
        self._device = device
        self._marks: dict[tuple[bool, int], list[Mark]] = {}
        self._open: list[Mark] | None = None
        self._inputs: dict[int, tuple[int, list[TensorVersion]]] = {}
        self._with_effects: set[int] = set()
        self.saved_bytes: Mapping[int, int] | None = None

    def begin(self, is_backward: bool, layer: int) -> None:
        self._open = self._marks[is_backward, layer] = [self._device.record("job")]

    def end(self) -> None:
        if self._open is not None:
            self._open.append(self._device.record("job"))
            self._open = None

    @contextmanager
    def inputs(self, layer: int, module: torch.nn.Module, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """Return a context for the forward of a layer, which sees what computing it again would do."""
        storages = {buffer.untyped_storage()._cdata for buffer in module.buffers()}
        self._inputs[layer] = storage_bytes(tensors, storages), [TensorVersion(tensor) for tensor in tensors]
        buffers = [TensorVersion(buffer) for buffer in module.buffers()]
        yield
        if any(buffer.is_changed for buffer in buffers):
            self._with_effects.add(layer)

    def end_forward(self, saved_bytes: Callable[[int], int]) -> None:
        """Take the bytes that layers have saved when their backward begins."""
        if self.saved_bytes is None:
            self.saved_bytes = {layer: saved_bytes(layer) for layer in self._inputs}
            changed = {layer for layer, (_, tensors) in self._inputs.items() if any(one.is_changed for one in tensors)}
            self._with_effects |= changed

    def layers(self, names: Sequence[str]) -> list[MeasuredLayer]:
        saved_bytes = self.saved_bytes or {}
        return [
            MeasuredLayer(
                name,
                self._seconds(False, layer),
                self._seconds(True, layer),
                saved_bytes.get(layer, 0),
                self._inputs.get(layer, (0, []))[0],
                layer not in self._with_effects,
            )
            for layer, name in enumerate(names)
        ]

    def _seconds(self, is_backward: bool, layer: int) -> float:
        marks = self._marks.get((is_backward, layer), [])
        if len(marks) < 2:
            return _LEAST_S
        marks[1].synchronize()
        return max(_LEAST_S, marks[1].time_s - marks[0].time_s)
