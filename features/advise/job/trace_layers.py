"""The layers of a traced job: its repeated modules, by the modules of its allocations
and the kernels beside them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from ebbtide.analysis.metrics.devices import (
    capacity_bytes,
    free_pool,
    main_device,
    memory_timeline,
)
from ebbtide.analysis.metrics.holders.categories import categorized_allocations
from ebbtide.analysis.metrics.iterations import steady_iterations
from ebbtide.analysis.metrics.recorded_free_memory import with_few_steps
from ebbtide.analysis.timeseries.step_functions import Floats, FreeTimeline, Ints
from ebbtide.interleave.model.layer_names import layer_names
from ebbtide.interleave.model.workload import (
    ActivationForm,
    FreeMemorySteps,
    Layer,
    Workload,
    with_layers,
)
from ebbtide.phases import BACKWARD, FORWARD
from ebbtide.profiler.trace import Trace


def with_trace_layers(workload: Workload, trace: Trace) -> Workload:
    """Return the workload of a trace with its layers; itself without modules of all
    allocations, or kernels, or with ranks. Recomputation in a layer's backward is taken
    out of its times, and belongs to its second form."""
    rank = trace.ranks[0]
    device, capacity = main_device(trace, rank), capacity_bytes(trace, rank)
    numbers, kernels = steady_iterations(trace).numbers, trace.kernels(rank)
    is_alone = (trace.rank(rank).world_size or len(trace.ranks)) == 1
    if device is None or capacity is None or not (is_alone and len(numbers)):
        return workload
    rows = categorized_allocations(trace, rank, device)
    if not rows["module"].notna().any() or kernels.empty:
        return workload
    phases = trace.phases(rank)
    phases = phases[phases["iteration"] <= numbers[-1]].sort_values("start_ns")
    layers = _TracedLayers(kernels, rows, phases[phases["iteration"] == numbers[-1]])
    weights = layers.sums(layers.category == "parameter")
    if len(weights) < 2 or weights.min() < workload.param_bytes:
        return workload
    params, frozen_bytes = weights / workload.param_bytes, np.zeros(len(weights))
    buffers = layers.sums(layers.category == "buffer")
    if buffers.sum() > weights.sum():
        # Quantized weights, which are frozen.
        weights = weights + layers.take_buffers()
    if weights.sum() > workload.params * workload.param_bytes * (1 + 1e-6):
        # Some are frozen: no gradient comes of them.
        trained, all_trained = layers.gradient_bytes()
        params = np.floor(workload.params * trained / max(all_trained, 1.0))
        frozen_bytes = np.maximum(weights - trained, 0.0)
    result, again_s = _model_layers(workload, layers, params, frozen_bytes)
    # What torch's allocator keeps beyond the tensors.
    kept, requested = (
        memory_timeline(trace, rank, pool or "")[1].max(initial=0)
        for pool in (free_pool(trace), "requested")
    )
    slack = max(0.0, float(kept) - float(requested))
    free = layers.free_memory(workload, capacity - slack, phases)
    without = replace(
        workload,
        sizes=None,
        backward_s=workload.backward_s - again_s,
        gpu_free=tuple((at_s, max(0.0, size)) for at_s, size in free),
        gpu_slack_bytes=slack,
        missing_bytes=max(0.0, *(-size for _, size in free)),
        # All chunks pass a layer one after another, so that its gradient is complete
        # when they have.
        accumulates=False,
        gradients_held_until_step=False,
        notes=(*workload.notes, f"layers: {layers.names[0]} to {layers.names[-1]}"),
    )
    return with_layers(without, result, len(layers.parts[FORWARD]), workload.name)


def _model_layers(
    workload: Workload, layers: _TracedLayers, params: Floats, frozen_bytes: Floats
) -> tuple[list[Layer], float]:
    """Return the layers of the model, and the time of all recomputation, s."""
    forward_s, _ = workload.forward_s * layers.phase_shares(FORWARD)
    backward_s, again_s = workload.backward_s * layers.phase_shares(BACKWARD)
    saved, recomputed = map(layers.sums, (layers.is_saved, layers.is_recomputed))
    outputs = layers.output_bytes()
    saved_outputs = layers.output_bytes(layers.is_saved)
    if saved_outputs[-1]:
        saved_outputs[:] = 0.0
    # Outputs that only the recomputation of the next layer holds: what follows the last
    # layer does not hold its own.
    whole = np.maximum(saved + recomputed - saved_outputs * (recomputed > 0), saved)
    result = []
    for number, name in enumerate(layers.names):
        everything = ActivationForm("all", float(whole[number]), 0.0)
        form, size, compute_s = "input", min(outputs[number], saved[number]), forward_s
        if recomputed[number]:
            form, size, compute_s = "as recorded", saved[number], again_s
        smallest = ActivationForm(form, float(size), float(compute_s[number]))
        times = float(forward_s[number]), float(backward_s[number])
        forms = (everything, smallest)
        frozen = float(frozen_bytes[number])
        result.append(Layer(name, int(params[number]), *times, forms, frozen))
    return result, float(again_s.sum())


class _TracedLayers:
    """Allocations (`rows`) and kernels of an iteration by layer: `names` in the order
    of the forward; the `layer` of each allocation, -1 outside; those that layers hold
    from the forward to the backward (`is_saved`), and that they compute again in the
    backward and hold when that is done (`is_recomputed`)."""

    def __init__(
        self, kernels: pd.DataFrame, rows: pd.DataFrame, phases: pd.DataFrame
    ) -> None:
        self.rows, self.phases, self._kernels = rows, phases, kernels
        # The rows of each phase: times of the host, and of the device.
        self.parts = {
            phase: [*phases[phases["phase"] == phase].itertuples()]
            for phase in (FORWARD, BACKWARD)
        }
        self._starts, self._ends, self._bytes = (
            rows[name].to_numpy(np.int64) for name in ("start_ns", "end_ns", "bytes")
        )
        self.category = rows["category"].astype(object).to_numpy()
        self._has_module = rows["module"].notna().to_numpy()
        self._forward = np.any(
            [self._starts_in(one) for one in self.parts[FORWARD]], axis=0
        )
        self.names, self.layer = self._layers()
        in_layer = self.layer >= 0
        in_forward = in_layer & self._forward
        self.is_saved = in_forward & (self.category == "activation")
        self.is_recomputed = np.zeros(len(rows), bool)
        self._again = np.zeros(len(rows), bool)
        for one in self.parts[BACKWARD]:
            again = in_layer & self._starts_in(one) & (self.category == "temporary")
            # One more for what is in no layer.
            last = np.full(len(self.names) + 1, -1)
            np.maximum.at(last, self.layer[again], self._starts[again])
            self._again |= again
            self.is_recomputed |= again & (self._ends > last[self.layer])
        of_params = np.isin(self.category, ("parameter", "gradient"))
        is_state = self.category == "optimizer_state"
        self._rest = ~(in_layer & of_params | is_state)
        if self._again.any():
            # What a forward frees that is computed again is in the memory of a layer at
            # work.
            self._rest &= ~in_forward | self.is_saved

    def _starts_in(self, one: Any) -> Any:
        """Return which allocations start in a row of a phase."""
        return (self._starts >= one.start_ns) & (self._starts < one.end_ns)

    def _layers(self) -> tuple[list[str], Ints]:
        """Return the entries of the list of modules with most parameters, and the layer
        of each allocation."""
        modules = self.rows["module"].astype(object).where(self._has_module, "")
        own = self.category == "parameter"
        entries = layer_names(
            set(modules), zip(modules[own], self._bytes[own], strict=True)
        )
        entry = modules.map(entries).to_numpy(object)  # NaN outside of layers.
        names = [
            name
            for name in dict.fromkeys(entry[self._forward])
            if isinstance(name, str)
        ]
        position = {name: number for number, name in enumerate(names)}
        return names, np.array([position.get(name, -1) for name in entry], np.int64)

    def sums(self, selected: Any) -> Floats:
        """Return the bytes of selected allocations by layer."""
        chosen = selected & (self.layer >= 0)
        return np.bincount(
            self.layer[chosen], self._bytes[chosen], len(self.names)
        ).astype(np.float64)

    def take_buffers(self) -> Floats:
        """Count buffers as weights of their layer, and return their bytes by layer."""
        own = (self.layer >= 0) & (self.category == "buffer")
        self._rest &= ~own
        return self.sums(own)

    def gradient_bytes(self) -> tuple[Floats, float]:
        """Return the bytes of gradients of the last backward by layer, and of all."""
        last = self.parts[BACKWARD][-1]
        is_gradient = self.category == "gradient"
        is_gradient &= (self._starts < last.end_ns) & (self._ends > last.start_ns)
        return self.sums(is_gradient), float(self._bytes[is_gradient].sum())

    def output_bytes(self, selected: Any = True) -> Floats:
        """Return the bytes of selected allocations by the last kernels of each layer in
        all forwards."""
        launches = np.sort(self._kernels["launch_ns"].to_numpy(np.int64))
        kernel = np.searchsorted(launches, self._starts, side="right")
        result = np.zeros(len(self.names))
        for one in self.parts[FORWARD]:
            own = self._starts_in(one) & (self.layer >= 0)
            last = np.zeros(len(self.names), np.int64)
            np.maximum.at(last, self.layer[own], kernel[own])
            result += self.sums(own & selected & (kernel == last[self.layer]))
        return result

    def phase_shares(self, phase: str) -> Floats:
        """Return shares of a phase by layer, and a second row of recomputation by
        layer. A kernel belongs to what is allocated, or in the backward released,
        next."""
        count = len(self.names)
        spent, length = np.zeros(2 * count), 0
        for one in self.parts[phase]:
            times, labels = self._events(one)
            kernels = self._kernels[
                self._kernels["launch_ns"].between(one.start_ns, one.end_ns)
            ].sort_values("end_ns")
            ends = np.maximum.accumulate(
                np.append(one.gpu_start_ns, kernels["end_ns"].to_numpy(np.int64))
            )
            position = np.searchsorted(times, kernels["launch_ns"].to_numpy(np.int64))
            label = np.append(labels, -1)[position]
            np.add.at(spent, label[label >= 0], np.diff(ends)[label >= 0])
            length += one.gpu_end_ns - one.gpu_start_ns
        return spent.reshape(2, count) / max(length, 1)

    def _events(self, one: Any) -> tuple[Ints, Ints]:
        """Return times and labels: the layer, for recomputation plus the number of
        layers; -1 for others."""
        started = self._starts_in(one)
        events = [(self._starts, self.layer, started)]
        if one.phase == BACKWARD:
            ended = (self._ends >= one.start_ns) & (self._ends < one.end_ns)
            ended &= self._has_module & (self._forward | self.is_recomputed)
            events = [
                (self._starts, self.layer, started & (self.category == "gradient")),
                (self._starts, self.layer + len(self.names), started & self._again),
                (self._ends, self.layer, ended),
            ]
        times = np.concatenate([moments[own] for moments, _, own in events])
        labels = np.concatenate([layers[own] for _, layers, own in events])
        order = np.argsort(times, kind="stable")
        return times[order], labels[order]

    def _changes(self, selected: Any) -> Ints:
        """Return (ns, bytes) of the start and of the end of each selected
        allocation."""
        sizes = self._bytes[selected]
        starts = np.stack([self._starts[selected], sizes], axis=1)
        ends = np.stack([self._ends[selected], -sizes], axis=1)
        return np.concatenate([starts, ends])

    def _spans_of_layers(self) -> Iterator[Ints]:
        """Yield (ns, bytes) of activations, sign reversed, all of a layer at once, as a
        plan counts them."""
        for phase, selected in (
            (FORWARD, self.is_saved),
            (BACKWARD, self.is_recomputed),
        ):
            for one in self.parts[phase]:
                for layer in range(len(self.names)):
                    own = selected & (self.layer == layer) & self._starts_in(one)
                    if own.any():
                        size = self._bytes[own].sum()
                        yield np.array(
                            [
                                (self._starts[own].min(), -size),
                                (self._ends[own].max(), size),
                            ],
                            np.int64,
                        )

    def free_memory(
        self, workload: Workload, capacity: float, phases: pd.DataFrame
    ) -> FreeMemorySteps:
        """Return (s, bytes) that are free beside parameters, gradients and activations
        of layers, and optimizer state: the least of all micro-steps. `phases` are those
        up to the end of the iteration."""
        changes = np.concatenate([self._changes(self._rest), *self._spans_of_layers()])
        changes = changes[np.argsort(changes[:, 0], kind="stable")]
        timeline = FreeTimeline(changes[:, 0], int(capacity) - changes[:, 1].cumsum())

        def least(spans: Sequence[tuple[int, int]]) -> float:
            sizes = (timeline.between(*span)[1] for span in spans if span[0] < span[1])
            return min((float(size.min()) for size in sizes), default=capacity)

        starts, ends = (
            phases[name].to_numpy(np.int64) for name in ("start_ns", "end_ns")
        )
        own = len(self.phases)
        gaps = (
            [*zip(ends[-own - 1 : -1], starts[-own:], strict=False)]
            if len(phases) > own
            else []
        )
        steps, begin = [], workload.other_s
        if workload.other_s:
            steps.append((0.0, least(gaps)))
        for phase, seconds in (
            (FORWARD, workload.forward_s),
            (BACKWARD, workload.backward_s),
        ):
            spans = [(one.start_ns, one.end_ns) for one in self.parts[phase]]
            in_phase = [(0.0, least(spans))]
            if len(spans) == 1:
                start, end = spans[0]
                at_ns, free = timeline.between(start, end)
                shares = ((at_ns - start) / (end - start)).tolist()
                in_phase = with_few_steps([*zip(shares, map(float, free), strict=True)])
            steps += [(begin + share * seconds, size) for share, size in in_phase]
            begin += seconds
        rows = self.phases[~self.phases["phase"].isin((FORWARD, BACKWARD))]
        steps.append(
            (begin, least([*zip(rows["start_ns"], rows["end_ns"], strict=True)]))
        )
        return tuple(steps)
