"""Times of layers in their first passes: what the job does itself, without waiting for
copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from ebbtide.interleave import offload_activations, stream_weights
from ebbtide.interleave.engine.devices.device import Mark, Stream
from ebbtide.interleave.engine.devices.emulated import EmulatedDevice, EmulatedMark
from tests.features.layers.stacks import LAYER_BYTES, LENGTH, WIDTH, stack

# Of issuing a copy, of waiting for copies, and of a layer's forward.
ISSUE_S, WAIT_S, COMPUTE_S = 1.0, 100.0, 10.0


class ClockDevice(EmulatedDevice):
    """A device with a clock for the job, on which issuing copies, waiting for them and
    compute take fixed times."""

    now_s = 0.0

    def record(self, stream: Stream) -> Mark:
        if stream != "job":
            return super().record(stream)
        mark = EmulatedMark()
        mark.set()
        mark.time_s = self.now_s
        return mark

    def submit(self, stream: Stream, work: Callable[[], object]) -> None:
        super().submit(stream, work)
        if getattr(work, "__name__", "") == "<lambda>":
            # A copy, not a wait.
            self.now_s += ISSUE_S

    def wait(self, stream: Stream, marks: Sequence[Mark]) -> None:
        super().wait(stream, marks)
        if stream == "job":
            self.now_s += WAIT_S


@pytest.mark.parametrize("weights", [False, True])
def test_measurement__counts_issuing_copies_and_leaves_out_waiting_for_them(
    weights: bool,
) -> None:
    device, model, slow = ClockDevice(), stack(), 0.0

    def compute(_: torch.Tensor) -> None:
        device.now_s += COMPUTE_S + slow

    for layer in model.layers:
        layer.after = compute
    owner: Any
    if weights:
        owner = stream_weights(model, memory_budget=1e9, device=device)
    else:
        owner = offload_activations(model, memory_budget=9 * LAYER_BYTES, device=device)
    with owner:
        for number in range(4):
            # The first pass has not warmed up, and garbage is collected in another one.
            slow = (50.0, 7.0, 0.0, 0.0)[number]
            model(torch.randn(LENGTH, WIDTH)).sum().backward()
        # One copy in each forward: of the layer's weights, or of the activations of the
        # layer before.
        assert owner.predicted.workload.forward_s == pytest.approx(
            5 * (COMPUTE_S + ISSUE_S), rel=0.01
        )
