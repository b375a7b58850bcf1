"""Measures a pass through layers: times and bytes."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import median_low

import torch

from ebbtide.features.layers.engine.orders import LEAST_S, MeasuredLayer, PassTimes
from ebbtide.features.layers.engine.transfers import SavedStorage, StorageTransfers
from ebbtide.interleave.engine.devices.device import Mark


class PassMeasurement:
    """Marks of what each layer does in the forward and in the backward, and its bytes.

    A layer begins where the one before has ended: issuing copies takes time, too.
    Waiting for copies is left out.

    Attributes:
        saved_bytes: By layer, of what the job does not hold itself; empty before the
            backward.
        left: What the job holds itself: the layer and the number of the saved tensor. A
            copy would free nothing.
        left_bytes: Bytes of that.
        comparisons: Layers that can be computed again, with the starts and ends of the
            fingerprints of what they save.
    """

    def __init__(
        self, transfers: StorageTransfers, before: "PassMeasurement | None"
    ) -> None:
        """Initialize; `before`: the pass before, since times are (lower) medians."""
        self._transfers = transfers
        transfers.measures = True
        transfers.waits.clear()
        # Before the first layer, behind the last one so far, and before the first
        # backward.
        self._began = self._ended = transfers.device.record("job")
        self._turned: Mark | None = None
        self._before = before
        # By direction and layer: the start, the end, and the starts and ends of waiting
        # in between.
        self._marks: dict[tuple[bool, int], list[Mark]] = {}
        self._open: list[Mark] | None = None
        self._input_bytes: dict[int, int] = {}
        self.comparisons: Mapping[int, Sequence[Mark]] = {}
        self.saved_bytes: dict[int, int] = {}
        self.left: set[tuple[int, int]] = set()
        self.left_bytes = 0

    def begin(self, is_backward: bool, layer: int) -> None:
        """Mark the start of a layer, unless it has begun. Layers of a backward end
        there."""
        if (is_backward, layer) not in self._marks:
            if is_backward:
                self.end()
                self._turned = self._turned or self._ended
            self._open = self._marks[is_backward, layer] = [self._ended]

    def end(self) -> None:
        self._ended = self._transfers.device.record("job")
        if self._open is not None:
            self._open += [self._ended, *self._transfers.waits]
        self._open = None
        self._transfers.waits.clear()

    def _passes(self) -> "list[PassMeasurement]":
        """Return this pass and those before it, the last one first.

        The very first is left out: it has not warmed up.
        """
        passes: list[PassMeasurement] = [self]
        while (before := passes[-1]._before) is not None:
            passes.append(before)
        return passes[:-1] or passes

    def outside(self) -> PassTimes:
        """Return the medians of the times outside of layers, over the passes before the
        one that begins now."""
        passes = self._passes()
        following = [
            self._transfers.device.record("job"),
            *(one._began for one in passes),
        ]
        turns = [one._turn_s() for one in passes]
        others = [
            _seconds_between([one._ended, mark])
            for one, mark in zip(passes, following, strict=False)
        ]
        return PassTimes(median_low(turns), median_low(others))

    def _turn_s(self) -> float:
        last = max(layer for is_backward, layer in self._marks if not is_backward)
        return _seconds_between([*self._marks[False, last][1:2], self._turned])

    def take_inputs(self, layer: int, tensors: Sequence[torch.Tensor]) -> None:
        """Take the inputs of a layer."""
        storages = {
            storage._cdata: storage.nbytes()
            for storage in (one.untyped_storage() for one in tensors)
        }
        self._input_bytes[layer] = sum(storages.values())

    def look(self, storages: Iterable[SavedStorage]) -> None:
        """See which storages still live, of layers whose copies have ended, and after
        the caller of layers has left them."""
        self.left |= {one.first for one in storages if one.is_of_others}

    def end_forward(self, of_layer: Mapping[int, Collection[SavedStorage]]) -> None:
        """Take what layers have saved when their backward begins, once."""
        if self.saved_bytes:
            return
        for layer, storages in of_layer.items():
            self.look(storages)
            # The last layer's output was never copied.
            left = {
                one for one in storages if one.first in self.left or one.host is None
            }
            self.left |= {one.first for one in left}
            self.left_bytes += sum(one.nbytes for one in left)
            self.saved_bytes[layer] = sum(
                one.nbytes for one in storages if one not in left
            )

    def layers(
        self, names: Sequence[str], weights: Sequence[tuple[int, int]] = ()
    ) -> list[MeasuredLayer]:
        """Return the layers.

        `weights` are the bytes of the streamed weights of each, and of their gradients.
        """
        return [
            MeasuredLayer(
                name,
                self._seconds(False, layer),
                self._seconds(True, layer),
                self.saved_bytes.get(layer, 0),
                self._input_bytes.get(layer, 0),
                layer in self.comparisons,
                *(weights[layer] if layer < len(weights) else (0, 0)),
                comparison_s=self._comparison_s(layer),
            )
            for layer, name in enumerate(names)
        ]

    def _comparison_s(self, layer: int) -> float:
        """Return the seconds of the fingerprints of what a layer saves, taken in the
        forward and again in the backward."""
        marks = self.comparisons.get(layer, ())
        return 2 * sum(map(_seconds_between, zip(marks[::2], marks[1::2], strict=True)))

    def _seconds(self, is_backward: bool, layer: int) -> float:
        marks = [one._marks.get((is_backward, layer), []) for one in self._passes()]
        waits = [
            sum(map(_seconds_between, zip(one[2::2], one[3::2], strict=True)))
            for one in marks
        ]
        return max(
            LEAST_S,
            median_low(
                _seconds_between(one[:2]) - wait
                for one, wait in zip(marks, waits, strict=True)
            ),
        )


def _seconds_between(marks: Sequence[Mark | None]) -> float:
    """Return the seconds between two marks; 0 where one is missing."""
    if len(marks) < 2 or marks[0] is None or marks[1] is None:
        return 0.0
    for mark in marks:
        if mark is not None:
            mark.synchronize()
    return max(0.0, marks[1].time_s - marks[0].time_s)
