"""Random orders of layers in place of the best ones."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from ebbtide.features.layers.engine import orders
from ebbtide.features.layers.engine.moving import MovedLayers
from ebbtide.features.layers.engine.orders import (
    LayerOptions,
    LayerOrders,
    MeasuredLayer,
    PassTimes,
)
from ebbtide.features.layers.layer_choice import LayerChoice, plan_of_choice
from ebbtide.features.layers.model import place
from ebbtide.interleave.policies import make_plan

# Forms of activations: all of them or the input, kept or offloaded.
_FORMS = (0, 1, ~0, ~0, ~1, ~1)


class RandomPlanner:
    """Makes random orders in place of the best ones, with the memory that their plan
    needs as budget."""

    def __init__(self, draw: random.Random, is_limited: bool = True) -> None:
        self._draw = draw
        self._is_limited = is_limited
        self.moved: MovedLayers | None = None
        self.kinds: list[str] = []

    def plan(
        self,
        layers: Sequence[MeasuredLayer],
        budget_bytes: float | None,
        rates: Mapping[str, float | None],
        options: LayerOptions,
        outside: PassTimes,
    ) -> LayerOrders:
        draw = self._draw
        machine = orders.machine_of_rates(rates)
        workload = orders.workload_of_layers(layers, 1e9, machine, options, outside)
        forms = tuple(draw.choice(_FORMS) for _ in layers)
        streamed = tuple(
            options.weights is not None and draw.random() < 0.6 for _ in layers
        )
        choice = LayerChoice(streamed, forms, draw.randint(1, 3), draw.randint(1, 3))
        plan = plan_of_choice(
            choice,
            workload,
            machine,
            lambda placed, _: make_plan("gpu-only", placed, machine),
        ).plan
        assert plan.layers is not None
        placed = place(workload, plan.layers)
        assert self.moved is not None
        memory = self.moved._mover.transfers.memory
        left_bytes = memory.limit_bytes - (budget_bytes or 0.0)
        need = max(one.total for one in placed.layer_memory) + left_bytes
        # Peaks before were in the memory of one layer at a time.
        memory.peak_bytes = 0
        memory.limit_bytes = need if self._is_limited else 1e9
        result = orders.orders_of_plan(plan, plan.layers, placed)
        self.kinds = [*map(result.kind, range(len(layers)))]
        return result
