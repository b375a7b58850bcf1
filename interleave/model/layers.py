"""Layers of a job whose weights and activations a plan may move: what a plan does with them, when, and their memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from ebbtide.interleave.model.operations import BACKWARD, FORWARD, point_at
from ebbtide.interleave.model.workload import LayerMemory, Workload, value_at

# Slots through which streamed weights, gradients and offloaded activations pass: one is used while others are copied.
SLOTS = 2
# Shares of a phase that differ by less differ by rounding.
_ROUNDING = 1e-12


class SavedActivation(NamedTuple):
    """A chunk's activations of a layer between its forward and its backward."""

    nbytes: float
    recompute_s: float = 0.0  # Of an iteration.
    offloaded: bool = False  # Whether it goes to the host, unless the backward comes to it first.


class LayerPlan(NamedTuple):
    """What a plan does with the weights and activations of layers.

    All chunks pass a layer before the first one passes the next layer.

    Attributes:
        streamed: Layers whose weights are on the host, and come to the device for the forward and for the backward.
        activations: By layer and then by chunk.
        weight_slots: Streamed layers whose weights the device holds at a time.
        activation_slots: Offloaded activations that it holds at a time.
        gradient_slots: Layers whose gradients it holds until they are copied to the host.
        rounds: Forwards with their backward in an iteration.
    """

    streamed: frozenset[int]
    activations: tuple[SavedActivation, ...]
    weight_slots: int = SLOTS
    activation_slots: int = SLOTS
    gradient_slots: int = SLOTS
    rounds: int = 1

    @property
    def offloaded(self) -> list[int]:
        """The offloaded activations in the order of the forward."""
        return [index for index, saved in enumerate(self.activations) if saved.offloaded]

    @property
    def copied(self) -> list[int]:
        """The activations that are copied to the host: the last offloaded ones stay in their slots."""
        offloaded = self.offloaded
        return offloaded[: max(0, len(offloaded) - self.activation_slots)]

    def host_bytes(self, workload: Workload) -> float:
        """Return the host memory of streamed weights and of copied activations."""
        weights = workload.param_bytes * sum(workload.layers[layer].params for layer in self.streamed)
        return weights + sum(self.activations[index].nbytes for index in self.copied)

    def counts(self, chunks: int) -> tuple[dict[str, int], dict[str, int]]:
        """Return the number of layers of each kind: by their weights, and by what most of their activations are."""
        layers = len(self.activations) // chunks
        activations = dict.fromkeys(("keep", "recompute", "offload"), 0)
        for layer in range(layers):
            saved = self.activations[layer * chunks : (layer + 1) * chunks]
            kinds = ["offload" if one.offloaded else "recompute" if one.recompute_s else "keep" for one in saved]
            activations[max(kinds, key=kinds.count)] += 1
        return {"resident": layers - len(self.streamed), "streamed": len(self.streamed)}, activations


class Stretch(NamedTuple):
    """The compute of one chunk in one layer, with the points of the iteration where it starts and ends."""

    is_backward: bool
    round: int
    layer: int
    index: int  # Of its activation.
    start: float
    end: float


class LayerTimes:
    """The compute of all chunks in all layers, in a placed workload (see `place`)."""

    def __init__(self, workload: Workload, plan: LayerPlan) -> None:
        self._workload = workload
        self._plan = plan

    @cached_property
    def stretches(self) -> list[Stretch]:
        """All stretches in the order of time."""
        return list(self._stretches())

    def _stretches(self) -> Iterator[Stretch]:
        workload, plan = self._workload, self._plan
        layers, shares = workload.layers, workload.chunk_shares
        count = len(layers) * len(shares)
        again = [saved.recompute_s / plan.rounds for saved in plan.activations]
        forward_s, backward_s = [], []
        for layer, one in enumerate(layers):
            own = again[layer * len(shares) : (layer + 1) * len(shares)]
            forward_s += [one.forward_s * share for share in shares]
            backward_s += [
                (one.backward_s - sum(own)) * share + extra for share, extra in zip(shares, own, strict=True)
            ]
        before_backward_s = workload.backward_s - sum(one.backward_s for one in layers)
        round_s = (workload.forward_s + workload.backward_s) / plan.rounds
        forward_ends, backward_ends = list(accumulate(forward_s)), list(accumulate(reversed(backward_s)))
        for number in range(plan.rounds):
            begin = number * round_s
            for index in range(count):
                start, end = forward_ends[index - 1] if index else 0.0, forward_ends[index]
                yield self._stretch(False, number, index, begin + start, begin + end)
            begin += round_s - workload.backward_s + before_backward_s
            for position in range(count):
                start, end = backward_ends[position - 1] if position else 0.0, backward_ends[position]
                yield self._stretch(True, number, count - 1 - position, begin + start, begin + end)

    def _stretch(self, is_backward: bool, number: int, index: int, start_s: float, end_s: float) -> Stretch:
        layer = index // len(self._workload.chunk_shares)
        return Stretch(is_backward, number, layer, index, self._point(start_s), self._point(end_s))

    def _point(self, seconds: float) -> float:
        """Return the point of the iteration at seconds from the start of the forward."""
        forward_s, backward_s = self._workload.forward_s, self._workload.backward_s
        share = min(seconds / forward_s, 1.0)
        if share < 1.0 - _ROUNDING:
            return FORWARD + share
        share = max(0.0, seconds - forward_s) / backward_s
        return BACKWARD + (0.0 if share < _ROUNDING else share if share < 1.0 - _ROUNDING else 1.0)


def saved_activations(
    workload: Workload, forms: Sequence[int], offloaded: Iterable[int] = ()
) -> tuple[SavedActivation, ...]:
    """Return the activations of layers that are kept in a form each, those of some layers on the host."""
    on_host = frozenset(offloaded)
    return tuple(
        SavedActivation(form.nbytes * share, form.recompute_s * share, layer in on_host)
        for layer, form in enumerate(one.forms[form] for one, form in zip(workload.layers, forms, strict=True))
        for share in workload.chunk_shares
    )


def place(workload: Workload, plan: LayerPlan | None) -> Workload:
    """Return a workload with the times and the free memory that a plan for its layers leaves.

    The backward has the recomputation; memory of the layers is not free; times of its layers are those of a round. With
    several rounds the forward has all but the last backward. A workload without layers, or a placed one, is returned
    itself.
    """
    if plan is None or not workload.layers or workload.layer_memory:
        return workload
    chunks, rounds = len(workload.chunk_shares), plan.rounds
    again = [saved.recompute_s for saved in plan.activations]
    layers = tuple(
        one._replace(
            forward_s=one.forward_s / rounds,
            backward_s=(one.backward_s + sum(again[layer * chunks : (layer + 1) * chunks])) / rounds,
        )
        for layer, one in enumerate(workload.layers)
    )
    backward_s = (workload.backward_s + sum(again)) / rounds
    placed = replace(
        workload,
        layers=layers,
        forward_s=workload.forward_s + (rounds - 1) * backward_s,
        backward_s=backward_s,
    )
    memory = tuple(_memory(placed, plan))
    placed = replace(placed, layer_memory=memory)
    if workload.gpu_free is None:
        return placed
    free = tuple((seconds_at(placed, point_at(workload, at_s)), size) for at_s, size in workload.gpu_free)
    times = sorted({at_s for at_s, _ in free} | {one.at_s for one in memory})
    held = tuple((one.at_s, one.total) for one in memory)
    left = [(at_s, value_at(free, at_s) - value_at(held, at_s)) for at_s in times]
    return replace(
        placed,
        gpu_free=tuple((at_s, max(0.0, size)) for at_s, size in left),
        missing_bytes=workload.missing_bytes + max(0.0, *(-size for _, size in left)),
    )


def seconds_at(workload: Workload, point: float) -> float:
    """Return the seconds from the start of an iteration to a point of it, without any waiting."""
    lengths = workload.other_s, workload.forward_s, workload.backward_s
    return sum(length * min(max(point - phase, 0.0), 1.0) for phase, length in enumerate(lengths))


def _memory(workload: Workload, plan: LayerPlan) -> Iterator[LayerMemory]:
    """Yield the device memory of the layers as a step function, from the start of the iteration."""
    layers = workload.layers
    weights = _in_slots([workload.param_bytes * one.params for one in layers], plan.streamed, plan.weight_slots)
    gradients = [workload.grad_bytes * one.params for one in layers]
    held = workload.gradients_held_until_step
    in_slots = 0.0 if held else sum(sorted(gradients, reverse=True)[: plan.gradient_slots])
    saved = plan.activations
    offloaded = plan.offloaded
    slots = _in_slots([one.nbytes for one in saved], frozenset(offloaded), plan.activation_slots, only_slots=True)
    # A chunk that is computed, and computed again, has all of its activations.
    stretches, shares = LayerTimes(workload, plan).stretches, workload.chunk_shares
    working = max(
        layers[index // len(shares)].forms[0].nbytes * shares[index % len(shares)] - one.nbytes
        for index, one in enumerate(saved)
    )
    always = slots + max(0.0, working)
    begin, turn, end = (seconds_at(workload, point) for point in (FORWARD, BACKWARD, BACKWARD + 1))
    changes = [(begin, 0.0, always), (turn, in_slots, 0.0), (end, -in_slots, -always)]
    # Gradients that are held, and added to in each micro-step, are there all the time.
    always_held = held and workload.accumulates
    if always_held:
        changes.append((0.0, sum(gradients), 0.0))
    for stretch in stretches:
        kept = 0.0 if saved[stretch.index].offloaded else saved[stretch.index].nbytes
        at_s = seconds_at(workload, stretch.end if stretch.is_backward else stretch.start)
        changes.append((at_s, 0.0, -kept if stretch.is_backward else kept))
        if held and not always_held and stretch.is_backward and stretch.round == 0:
            own = gradients[stretch.layer] * shares[stretch.index % len(shares)]
            changes.append((seconds_at(workload, stretch.start), own, 0.0))
    now = LayerMemory(0.0, weights, 0.0, 0.0)
    for at_s, gradient, activation in sorted(changes):
        if at_s > now.at_s:
            yield now
        now = LayerMemory(at_s, weights, now.gradients + gradient, max(0.0, now.activations + activation))
    yield now


def _in_slots(sizes: Sequence[float], moved: frozenset[int], slots: int, only_slots: bool = False) -> float:
    """Return the bytes of what stays, unless only slots count, and of the slots of what moves."""
    largest = max((sizes[index] for index in moved), default=0.0)
    stays = 0.0 if only_slots else sum(size for index, size in enumerate(sizes) if index not in moved)
    return stays + min(slots, len(moved)) * largest
