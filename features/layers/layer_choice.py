"""The options `weights` and `activations`: which layers are streamed, and which
activations are kept, recomputed or offloaded, together with the policy of the
optimizer's state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import combinations, pairwise, product
from typing import NamedTuple

from ebbtide.errors import MachineError, PolicyError
from ebbtide.features.layers.kinds import LAYER_KINDS
from ebbtide.features.layers.layer_operations import with_layer_operations
from ebbtide.features.layers.model import (
    ACTIVATION_KINDS,
    SLOTS,
    LayerPlan,
    place,
    saved_activations,
    with_layer_copies,
)
from ebbtide.interleave.model.durations import link_rates
from ebbtide.interleave.model.operations import NO_OVERLAP, Overlap, overlaps_of
from ebbtide.interleave.model.plan import Plan
from ebbtide.interleave.model.schedule import available_host_bytes
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.simulation.bound import min_iteration_s
from ebbtide.interleave.simulation.simulator import Steps, simulate_steps
from ebbtide.machines.machine import Machine

WEIGHTS = ("resident", "streamed", "streamed:K", "auto")
ACTIVATIONS = (*ACTIVATION_KINDS, "auto")
LAYER_OPTIONS = {"weights": WEIGHTS, "activations": ACTIVATIONS}
_MOST_SLOTS = 4
# The search simulates this many operations, twice as many with few layers, and at least
# this many for each plan.
_SEARCHED_OPS, _LEAST_OPS = 100_000, 50
# Up to this many choices, all are compared; with up to this many blocks of layers, two
# are changed at a time; this many of the choices that the search starts from are
# changed.
_EXACT_CHOICES, _PAIRED_BLOCKS, _CLIMBS = 1100, 6, 12


def streamed_count(weights: str) -> int | None:
    """Return K of `streamed:K`; None for other choices."""
    _, colon, number = weights.partition(":")
    return int(number) if colon else None


def spread(count: int, layers: int) -> tuple[bool, ...]:
    """Return which layers are streamed where some are, evenly spread.

    Compute of the others hides their copies.
    """
    until = [layer * count // layers for layer in range(layers + 1)]
    return tuple(after > before for before, after in pairwise(until))


class LayerChoice(NamedTuple):
    """The choice for each layer: whether its weights are streamed, and the form in
    which its activations are kept, or `~form` where they are offloaded."""

    streamed: tuple[bool, ...]
    forms: tuple[int, ...]
    weight_slots: int = SLOTS
    activation_slots: int = SLOTS

    def plan(self, workload: Workload) -> LayerPlan:
        """Return the plan for the layers of a workload."""
        return LayerPlan(
            frozenset(
                layer for layer, streamed in enumerate(self.streamed) if streamed
            ),
            saved_activations(
                workload,
                [form if form >= 0 else ~form for form in self.forms],
                [layer for layer, form in enumerate(self.forms) if form < 0],
            ),
            self.weight_slots,
            self.activation_slots,
        )

    def changed(
        self, layers: range, streamed: bool | None, form: int | None
    ) -> LayerChoice:
        """Return the choice with other weights or forms of some layers."""
        weights, forms = list(self.streamed), list(self.forms)
        for layer in layers:
            weights[layer] = weights[layer] if streamed is None else streamed
            forms[layer] = forms[layer] if form is None else form
        return LayerChoice(
            tuple(weights), tuple(forms), self.weight_slots, self.activation_slots
        )


# Makes the plan for the optimizer's state in a placed workload; whether updates may end
# in the next forward.
Maker = Callable[[Workload, bool], Plan]
# Bytes of device and of host memory that are missing, the mean iteration, s, and the
# bytes of layers that move.
Cost = tuple[float, float, float, float]
# Yields choices that are somewhat different.
Change = Callable[[LayerChoice], Iterator[LayerChoice]]


class Evaluated(NamedTuple):
    """A plan of all that moves, and its cost."""

    cost: Cost
    plan: Plan


def plan_of_choice(
    choice: LayerChoice,
    workload: Workload,
    machine: Machine,
    make: Maker,
    leaves_link: bool = False,
) -> Evaluated:
    """Return the plan of a choice.

    `make` makes the state's plan for the memory that the layers leave, or also for the
    time and the rest of the link that their copies leave.
    """
    layers = choice.plan(workload)
    placed = place(workload, layers)
    limit = available_host_bytes(workload, machine)
    left = None if limit is None else max(0.0, limit - layers.host_bytes(workload))
    busy = (
        with_layer_copies(placed, layers, link_rates(placed, machine).values())
        if leaves_link
        else placed
    )
    state_workload = replace(busy, host_free_bytes=left, missing_bytes=0.0)

    def evaluate(state_workload: Workload) -> Evaluated:
        # Weights are streamed when the update has ended.
        state = make(state_workload, not layers.streamed)
        plan = with_layer_operations(state, placed, layers)
        return Evaluated(cost_of(simulate_steps(plan, placed, machine), limit), plan)

    result = evaluate(state_workload)
    if (
        result.cost[0]
        and not placed.missing_bytes
        and placed.min_free_bytes is not None
    ):
        # Copies of layers delay copies of state: without windows it is on the device as
        # long as there is memory.
        always_free = replace(state_workload, gpu_free=((0.0, placed.min_free_bytes),))
        result = min(result, evaluate(always_free), key=lambda one: one.cost)
    return result


def cost_of(steps: Steps, host_limit_bytes: float | None) -> Cost:
    """Return the cost of simulated steps."""
    schedule = steps.valid
    missing = schedule.workload.missing_bytes
    if schedule.fits_device(None) is False:
        missing += max(
            1.0, schedule.peak_device_bytes - (schedule.workload.min_free_bytes or 0.0)
        )
    excess = (
        0.0
        if host_limit_bytes is None
        else max(0.0, schedule.host_bytes() - host_limit_bytes)
    )
    moved = sum(op.nbytes for op in schedule.plan.ops if op.kind in LAYER_KINDS)
    return missing, excess, steps.rating_s, moved


def plan_with_layers(
    workload: Workload,
    machine: Machine,
    options: Mapping[str, str],
    make: Maker,
    quick: Maker,
) -> Plan:
    """Return the plan of a policy for a workload with layers.

    `make` makes it for the state. With `auto` it is the best one found, by plans of
    `quick`: never worse than the same with one choice for all layers.
    """
    search = LayerSearch(workload, machine, options)
    ranked = search.run(quick) if len(search.singles) > 1 else search.singles
    chosen, best = ranked[0], plan_of_choice(ranked[0], workload, machine, quick)
    for choice in ranked:
        if choice in search.singles and (
            len(ranked) == 1 or search.may_be_better(choice, best.cost)
        ):
            result = plan_of_choice(choice, workload, machine, make)
            if result.cost < best.cost:
                chosen, best = choice, result
    for choice in {ranked[0], chosen} if len(ranked) > 1 else ():
        best = min(
            best,
            plan_of_choice(choice, workload, machine, make, True),
            key=lambda one: one.cost,
        )
    return best.plan.validate(place(workload, best.plan.layers))


class LayerSearch:
    """The search for the best choice by simulation, from one for all layers, by changes
    of blocks while that helps."""

    def __init__(
        self, workload: Workload, machine: Machine, options: Mapping[str, str]
    ) -> None:
        self._workload = workload
        self._machine = machine
        self._costs: dict[LayerChoice, Cost] = {}
        # Bytes of device memory that a choice lacks whatever the plan.
        self._missing: dict[LayerChoice, float] = {}
        count, last = (
            len(workload.layers),
            min(len(layer.forms) for layer in workload.layers) - 1,
        )
        self._ops_left, self._plan_ops = (
            _SEARCHED_OPS * (1 + (count <= _PAIRED_BLOCKS)),
            0,
        )
        named = dict(zip(ACTIVATION_KINDS, (0, last, ~0, ~last), strict=True))
        weights, activations = (
            options.get("weights", "resident"),
            options.get("activations", "keep"),
        )
        if activations.startswith("recompute") and not last:
            raise PolicyError(
                f"activations={activations} needs layers with recompute_s, or with "
                "several forms"
            )
        fixed = streamed_count(weights)
        if fixed is not None and fixed > count:
            raise PolicyError(f"weights={weights}: {workload.name} has {count} layers")
        # The choices of a layer, and of all layers: `streamed:K` leaves none.
        self._weights = (
            ()
            if fixed is not None
            else (False, True)
            if weights == "auto"
            else (weights == "streamed",)
        )
        self._patterns = [(streamed,) * count for streamed in self._weights] or [
            spread(fixed or 0, count)
        ]
        kept = range(last + 1)
        self._forms = (
            (*kept, *(~form for form in kept))
            if activations == "auto"
            else (named[activations],)
        )
        overlaps = overlaps_of(options.get("overlap", "none"))
        self._overlap = Overlap(
            *(any(flags) for flags in zip(NO_OVERLAP, *overlaps, strict=True))
        )
        self.singles = [
            LayerChoice(streamed, (form,) * count)
            for streamed, form in product(self._patterns, self._forms)
        ]

    def run(self, make: Maker) -> list[LayerChoice]:
        """Return choices, the best ones first."""
        count = len(self._workload.layers)
        if (
            max(1, len(self._weights) ** count)
            * len(self._forms) ** count
            * _MOST_SLOTS
            <= _EXACT_CHOICES
        ):
            for choice in self._all():
                self._cost(choice, make)
        else:
            best: Cost | None = None
            for start in self._starts():
                cost = self._cost(start, make, best)
                best = cost if best is None else min(best, cost)
            for start in sorted(self._costs, key=self._rank)[:_CLIMBS]:
                self._climb(start, make)
        return sorted(self._costs, key=self._rank)

    def _rank(self, choice: LayerChoice) -> tuple[Cost, int]:
        """Return the cost of a choice.

        Of equally good choices, one with fewer slots has more memory for other plans.
        """
        return self._costs[choice], choice.weight_slots + choice.activation_slots

    def may_be_better(self, choice: LayerChoice, best: Cost) -> bool:
        """Return whether a choice may have a lower cost.

        The plan of the optimizer's state may be any.
        """
        layers = choice.plan(self._workload)
        placed = place(self._workload, layers)
        limit, on_host = (
            available_host_bytes(placed, self._machine),
            layers.host_bytes(self._workload),
        )
        if not self._machine.storage:
            on_host += placed.state_bytes * placed.params - (
                placed.min_free_bytes or 0.0
            )
        excess = 0.0 if limit is None else max(0.0, on_host - limit)
        return (placed.missing_bytes, excess, self._least_s(placed, layers)) < best[:3]

    def _least_s(self, placed: Workload, layers: LayerPlan) -> float:
        """Return a lower bound of the iteration with a plan for layers, s: the bound of
        the state beside the layers' copies.

        Parameters of streamed layers need not return to the device."""
        busy = with_layer_copies(
            placed, layers, link_rates(placed, self._machine).values()
        )
        state = replace(busy, sizes=placed.subgroups, layers=(), layer_memory=())
        state = replace(state, param_bytes=0.0) if layers.streamed else state
        with suppress(MachineError):
            return min_iteration_s(state, self._machine, self._overlap)
        return state.compute_s

    def _all(self) -> Iterator[LayerChoice]:
        count, slots = len(self._workload.layers), range(1, SLOTS + 1)
        for weights in (
            product(self._weights, repeat=count) if self._weights else self._patterns
        ):
            for forms in product(self._forms, repeat=count):
                yield from (
                    LayerChoice(weights, forms, *one) for one in product(slots, slots)
                )

    def _starts(self) -> Iterator[LayerChoice]:
        """Yield choices that are alike for all layers, and some with every second,
        third or fourth layer resident.

        The compute of a resident layer hides the copy for the next one."""
        count = len(self._workload.layers)
        for single in self.singles:
            for slots in (
                (SLOTS, 1) if any(single.streamed) or single.forms[0] < 0 else (SLOTS,)
            ):
                choice = single._replace(weight_slots=slots, activation_slots=slots)
                yield choice
                if len(self._weights) > 1 and single.streamed[0]:
                    for stride in (2, 3, 4):
                        yield choice.changed(
                            range(stride // 2, count, stride), False, None
                        )

    def _climb(self, choice: LayerChoice, make: Maker) -> None:
        """Change blocks of layers, and then smaller ones.

        Go on as long as that lowers the cost.
        """
        count = len(self._workload.layers)
        size = count
        while size and self._ops_left > 0:
            before = choice
            blocks = [
                range(first, min(count, first + size))
                for first in range(0, count, size)
            ]
            changes: list[Change] = [
                partial(self._change_layers, layers=layers) for layers in blocks
            ]
            choice = self._improved(choice, [self._change_slots, *changes], make)
            if choice == before and 1 < len(blocks) <= _PAIRED_BLOCKS:
                # With other slots, or in two blocks: one gives memory that the other
                # may take.
                pairs = [
                    *product(changes, [self._change_slots]),
                    *combinations(changes, 2),
                ]
                choice = self._improved(
                    choice, [_in_turn(*pair) for pair in pairs], make
                )
            size = size if choice != before else size // 2

    def _improved(
        self, choice: LayerChoice, changes: Sequence[Change], make: Maker
    ) -> LayerChoice:
        """Return a choice after all changes that lower its cost."""
        best = self._cost(choice, make)
        for change in changes:
            for candidate in change(choice):
                if self._ops_left < 0:
                    return choice
                if (cost := self._cost(candidate, make, best)) < best:
                    choice, best = candidate, cost
        return choice

    def _change_slots(self, choice: LayerChoice) -> Iterator[LayerChoice]:
        """Yield choices with another number of slots."""
        for change in (-1, 1):
            if (
                any(choice.streamed)
                and 1 <= choice.weight_slots + change <= _MOST_SLOTS
            ):
                yield choice._replace(weight_slots=choice.weight_slots + change)
            if (
                min(choice.forms) < 0
                and 1 <= choice.activation_slots + change <= _MOST_SLOTS
            ):
                yield choice._replace(activation_slots=choice.activation_slots + change)

    def _change_layers(
        self, choice: LayerChoice, layers: range
    ) -> Iterator[LayerChoice]:
        """Yield choices that differ in a block of layers."""
        # What all of them have already is no change.
        weights, forms = ({values[layer] for layer in layers} for values in choice[:2])
        for streamed in (
            None,
            *(value for value in self._weights if weights != {value}),
        ):
            for form in (None, *(value for value in self._forms if forms != {value})):
                yield choice.changed(layers, streamed, form)

    def _cost(
        self, choice: LayerChoice, make: Maker, limit: Cost | None = None
    ) -> Cost:
        """Return the cost of a choice.

        Return the missing memory alone where it is above the limit's.
        """
        if (cost := self._costs.get(choice)) is not None:
            return cost
        if (missing := self._missing.get(choice)) is None:
            self._missing[choice] = missing = place(
                self._workload, choice.plan(self._workload)
            ).missing_bytes
            chunks = len(self._workload.layers) * len(self._workload.chunk_shares)
            self._ops_left -= max(_LEAST_OPS, self._plan_ops + 2 * chunks)
        if limit is not None and missing > limit[0]:
            return missing, 0.0, 0.0, 0.0
        result = plan_of_choice(choice, self._workload, self._machine, make)
        self._plan_ops = len(result.plan.ops)
        self._costs[choice] = result.cost
        return result.cost


def _in_turn(first: Change, second: Change) -> Change:
    """Return the change that makes one after the other."""
    return lambda choice: (
        after for before in first(choice) for after in second(before)
    )
