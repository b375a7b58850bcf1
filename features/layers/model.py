"""Layers of a job whose weights and activations a plan may move, what a plan does with
them, and their memory."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from operator import itemgetter, sub
from typing import NamedTuple

from ebbtide.interleave.model.operations import BACKWARD, FORWARD, point_at
from ebbtide.interleave.model.workload import Layer, LayerMemory, Workload, value_at

# Slots through which streamed weights, gradients and offloaded activations pass: one is
# used while others are copied.
SLOTS = 2
# What may happen to the activations of a layer: some recomputation may follow what was
# kept, or came from the host.
ACTIVATION_KINDS = ("keep", "recompute", "offload", "recompute-offload")
# Shares of a phase that differ by less differ by rounding.
_ROUNDING = 1e-12


class SavedActivation(NamedTuple):
    """A chunk's activations of a layer between its forward and its backward."""

    nbytes: float
    recompute_s: float = 0.0  # Of an iteration.
    # Whether it goes to the host, unless the backward comes to it first.
    offloaded: bool = False

    @property
    def moves(self) -> bool:
        """Whether it is not simply kept on the device."""
        return self.offloaded or self.recompute_s > 0

    @property
    def kind(self) -> str:
        """One of `ACTIVATION_KINDS`."""
        return ACTIVATION_KINDS[(self.recompute_s > 0) + 2 * self.offloaded]


class LayerPlan(NamedTuple):
    """The part of a plan on layers: what happens to weights and activations.

    All chunks pass a layer before the first one passes the next layer."""

    # Layers whose weights are on the host, and come to the device for the forward and
    # for the backward.
    streamed: frozenset[int]
    activations: tuple[SavedActivation, ...]  # By layer and then by chunk, of a round.
    # Streamed layers whose weights the device holds at a time.
    weight_slots: int = SLOTS
    activation_slots: int = SLOTS  # Offloaded activations that it holds at a time.
    # Layers whose gradients it holds until they are copied to the host.
    gradient_slots: int = SLOTS
    rounds: int = 1  # Forwards with their backward in an iteration.
    # Layers that are on the host at a time, where all of them take turns in the slots.
    swapped: int | None = None

    @property
    def offloaded(self) -> list[int]:
        """The offloaded activations in the order of the forward."""
        return [
            index for index, saved in enumerate(self.activations) if saved.offloaded
        ]

    @property
    def copied(self) -> list[int]:
        """The activations that are copied to the host.

        The last offloaded ones stay in their slots.
        """
        offloaded = self.offloaded
        return offloaded[: max(0, len(offloaded) - self.activation_slots)]

    def place(self, workload: Workload) -> Workload:
        """Return a workload with the times and free memory that the plan leaves.

        See `place`.
        """
        return place(workload, self)

    def host_bytes(self, workload: Workload) -> float:
        """Return the host memory of streamed weights and of copied activations."""
        weights = sum(workload.streamed_bytes[layer] for layer in self.streamed)
        if self.swapped is not None:
            weights *= self.swapped / max(len(self.streamed), 1)
        return weights + sum(self.activations[index].nbytes for index in self.copied)

    def counts(self, chunks: int) -> tuple[dict[str, int], dict[str, int]]:
        """Return the number of layers of each kind.

        Kinds are by their weights, and by what most of their activations are.
        """
        layers = len(self.activations) // chunks
        activations = dict.fromkeys(ACTIVATION_KINDS, 0)
        for layer in range(layers):
            saved = self.activations[layer * chunks : (layer + 1) * chunks]
            kinds = [one.kind for one in saved]
            activations[max(kinds, key=kinds.count)] += 1
        streamed = len(self.streamed) if self.swapped is None else self.swapped
        return {"resident": layers - streamed, "streamed": streamed}, activations


class Stretch(NamedTuple):
    """The compute of one chunk in one layer, with the points of the iteration where it
    starts and ends."""

    is_backward: bool
    round: int
    layer: int
    activation: int  # The index of its activation.
    start: float
    end: float


def stretches_of(workload: Workload, plan: LayerPlan) -> list[Stretch]:
    """Return the compute of all chunks in all layers in the order of time.

    The workload is placed (see `place`).
    """
    return _stretches(
        workload.layers,
        workload.chunk_shares,
        workload.forward_s,
        workload.backward_s,
        plan,
    )


@lru_cache(maxsize=8)
def _stretches(
    layers: Sequence[Layer],
    shares: Sequence[float],
    forward_total_s: float,
    backward_total_s: float,
    plan: LayerPlan,
) -> list[Stretch]:
    again = [saved.recompute_s / plan.rounds for saved in plan.activations]
    forward_s, backward_s = [], []
    for layer, one in enumerate(layers):
        own = again[layer * len(shares) : (layer + 1) * len(shares)]
        once_s = one.backward_s - sum(own)
        forward_s += [one.forward_s * share for share in shares]
        backward_s += [
            once_s * share + extra for share, extra in zip(shares, own, strict=True)
        ]
    round_s = (forward_total_s + backward_total_s) / plan.rounds
    forward_until = [0.0, *accumulate(forward_s)]
    first_s = round_s - sum(layer.backward_s for layer in layers)
    backward_until = [*accumulate(reversed(backward_s), initial=first_s)]
    indices = range(len(forward_s))
    result = []
    for number in range(plan.rounds):
        for is_backward, until, order in (
            (False, forward_until, indices),
            (True, backward_until, reversed(indices)),
        ):
            points = [
                _point(number * round_s + seconds, forward_total_s, backward_total_s)
                for seconds in until
            ]
            result += [
                Stretch(is_backward, number, index // len(shares), index, start, end)
                for index, start, end in zip(order, points, points[1:], strict=False)
            ]
    return result


def _point(seconds: float, forward_s: float, backward_s: float) -> float:
    """Return the point of the iteration at seconds from the start of the forward."""
    share = seconds / forward_s
    if share < 1.0 - _ROUNDING:
        return FORWARD + share
    share = (seconds - forward_s) / backward_s
    return BACKWARD + (
        0.0 if share < _ROUNDING else share if share < 1.0 - _ROUNDING else 1.0
    )


def saved_activations(
    workload: Workload, forms: Sequence[int], offloaded: Iterable[int] = ()
) -> tuple[SavedActivation, ...]:
    """Return the activations of layers that are kept in a form each.

    Some layers have theirs on the host.
    """
    on_host = frozenset(offloaded)
    return tuple(
        SavedActivation(form.nbytes * share, form.recompute_s * share, layer in on_host)
        for layer, form in enumerate(
            one.forms[form] for one, form in zip(workload.layers, forms, strict=True)
        )
        for share in workload.chunk_shares
    )


def place(workload: Workload, plan: LayerPlan | None) -> Workload:
    """Return a workload with the times and the free memory that a layer plan leaves.

    Without layers, or placed, return the workload itself. Layers and chunks are counted
    for one round; with several, alike, the forward has all but the last backward.
    """
    if plan is None or not workload.layers or workload.layer_memory:
        return workload
    return _placed(workload, plan)


@lru_cache(maxsize=8)
def _placed(workload: Workload, plan: LayerPlan) -> Workload:
    rounds, shares = (
        plan.rounds,
        workload.chunk_shares[: len(workload.chunk_shares) // plan.rounds],
    )
    chunks = len(shares)
    again = [saved.recompute_s for saved in plan.activations]
    layers = tuple(
        one._replace(
            forward_s=one.forward_s / rounds,
            backward_s=(
                one.backward_s + sum(again[layer * chunks : (layer + 1) * chunks])
            )
            / rounds,
            forms=tuple(
                form._replace(nbytes=form.nbytes / rounds) for form in one.forms
            ),
        )
        for layer, one in enumerate(workload.layers)
    )
    backward_s = (workload.backward_s + sum(again)) / rounds
    placed = replace(
        workload,
        layers=layers,
        chunk_shares=tuple(share / sum(shares) for share in shares),
        forward_s=workload.forward_s + (rounds - 1) * backward_s,
        backward_s=backward_s,
    )
    memory = tuple(_memory(placed, plan))
    placed = replace(placed, layer_memory=memory)
    if workload.gpu_free is None:
        return placed
    steps = [
        (seconds_at(placed, point_at(workload, at_s)), size, None)
        for at_s, size in workload.gpu_free
    ]
    left: dict[float, float] = {}
    free, used = value_at(workload.gpu_free, 0.0), 0.0
    for at_s, size, one in sorted(
        [*steps, *((one.at_s, 0.0, one) for one in memory)], key=itemgetter(0)
    ):
        free, used = (size, used) if one is None else (free, one.total)
        left[at_s] = free - used
    return replace(
        placed,
        gpu_free=tuple((at_s, max(0.0, size)) for at_s, size in left.items()),
        missing_bytes=workload.missing_bytes
        + max(0.0, *(-size for size in left.values())),
    )


def with_layer_copies(
    placed: Workload, plan: LayerPlan, rates: Collection[float]
) -> Workload:
    """Return a placed workload of one round that is as long as the copies of its
    layers.

    Its forward and backward are as long as the copies that must end in them, by the
    rates of the link to and from the device; these copies count as collectives."""
    sizes = [placed.streamed_bytes[layer] for layer in sorted(plan.streamed)]
    moved = sum(plan.activations[index].nbytes for index in plan.copied)
    link = {
        "forward": (sum(sizes[plan.weight_slots :]), moved),
        "backward": (sum(sizes[: max(0, len(sizes) - plan.weight_slots)]) + moved, 0.0),
    }
    forward, backward = (
        max(
            length,
            *(
                nbytes / rate
                for nbytes, rate in zip(copies, rates, strict=True)
                if rate
            ),
        )
        / length
        for length, copies in zip(
            (placed.forward_s, placed.backward_s), link.values(), strict=True
        )
    )
    for phase, up, down in placed.collective_bytes:
        own = link.get(phase, (0.0, 0.0))
        link[phase] = own[0] + up, own[1] + down
    longer = replace(
        placed,
        forward_s=forward * placed.forward_s,
        backward_s=backward * placed.backward_s,
        layers=tuple(
            one._replace(
                forward_s=forward * one.forward_s, backward_s=backward * one.backward_s
            )
            for one in placed.layers
        ),
        collective_bytes=tuple((phase, *both) for phase, both in link.items()),
    )
    if placed.gpu_free is None:
        return longer
    return replace(
        longer,
        gpu_free=tuple(
            (seconds_at(longer, point_at(placed, at_s)), size)
            for at_s, size in placed.gpu_free
        ),
    )


def seconds_at(workload: Workload, point: float) -> float:
    """Return the seconds from the start of an iteration to a point of it.

    There is no waiting.
    """
    if point < FORWARD:
        return workload.other_s * point
    if point < BACKWARD:
        return workload.other_s + workload.forward_s * (point - FORWARD)
    return (
        workload.other_s
        + workload.forward_s
        + workload.backward_s * min(point - BACKWARD, 1.0)
    )


def _memory(workload: Workload, plan: LayerPlan) -> Iterator[LayerMemory]:
    """Yield the device memory of the layers as a step function, from the start of the
    iteration.

    Activations of all chunks count from the start of a layer's forward to the end of
    its backward.
    """
    layers, shares, saved = workload.layers, workload.chunk_shares, plan.activations
    sizes = workload.streamed_bytes
    largest = max((sizes[layer] for layer in plan.streamed), default=0.0)
    stays = sum(size for layer, size in enumerate(sizes) if layer not in plan.streamed)
    stays += workload.adapter_bytes
    weights = stays + min(plan.weight_slots, len(plan.streamed)) * largest
    gradients = [workload.grad_bytes * one.params for one in layers]
    until_step = workload.gradients_held_until_step
    in_slots = (
        0.0
        if until_step or workload.host_gradient_bytes is not None
        else sum(sorted(gradients, reverse=True)[: plan.gradient_slots])
    )
    offloaded = sorted((one.nbytes for one in saved if one.offloaded), reverse=True)
    # A chunk that is computed, and computed again, has all of its activations.
    full = (one.forms[0].nbytes * share for one in layers for share in shares)
    working = max(map(sub, full, (one.nbytes for one in saved)))
    slots, working = sum(offloaded[: plan.activation_slots]), max(0.0, working)
    begin, turn, end = (
        seconds_at(workload, point) for point in (FORWARD, BACKWARD, BACKWARD + 1)
    )
    changes = [
        (begin, 0.0, slots + working),
        (turn, in_slots, 0.0),
        (end, -in_slots, -slots - working),
    ]
    # Gradients that are held, and added to in each micro-step, are there all the time.
    all_the_time = until_step and workload.accumulates
    if all_the_time:
        changes.append((0.0, sum(gradients), 0.0))
    chunks, stretches = len(shares), stretches_of(workload, plan)
    count = len(saved)
    for first in range(count, len(stretches), 2 * count):
        # What is after the last layer is computed without it.
        last_end, first_start = (
            seconds_at(workload, point)
            for point in (stretches[first - 1].end, stretches[first].start)
        )
        changes += [(last_end, 0.0, -working), (first_start, 0.0, working)]
    kept = [
        sum(one.nbytes for one in saved[first : first + chunks] if not one.offloaded)
        for first in range(0, count, chunks)
    ]
    # Chunks of a backward come in reverse: the last one of a layer is the first.
    for stretch in stretches[::chunks]:
        if not stretch.is_backward:
            changes.append(
                (seconds_at(workload, stretch.start), 0.0, kept[stretch.layer])
            )
        elif until_step and not all_the_time and not stretch.round:
            changes.append(
                (seconds_at(workload, stretch.start), gradients[stretch.layer], 0.0)
            )
    for stretch in stretches[chunks - 1 :: chunks]:
        if stretch.is_backward:
            changes.append(
                (seconds_at(workload, stretch.end), 0.0, -kept[stretch.layer])
            )
    now = LayerMemory(0.0, weights, 0.0, 0.0)
    for at_s, gradient, activation in sorted(changes):
        if at_s > now.at_s:
            yield now
        now = LayerMemory(
            at_s,
            weights,
            now.gradients + gradient,
            max(0.0, now.activations + activation),
        )
    yield now
