"""The exchange of parameters between ranks that have parts of them, for rules that
update a parameter as a whole."""

from collections.abc import Iterable, Mapping, Sequence

import torch

from ebbtide import seams
from ebbtide.interleave.engine.rules.rule import UpdateRule

# Tensors of a parameter, such as its gradient alone or the rows of its state.
Tensors = Sequence[torch.Tensor]
Shape = tuple[int, ...]


class Exchange:
    """Parameters, by index, whose parts ranks have and which one rank updates as a
    whole; none here.

    Tensors of a parameter are flat: whole on its owner, and empty on the other ranks.
    Every rank must call each method, in the same order.

    Attributes:
        owners: The rank that updates each parameter.
        own: The shapes of those that this rank updates.
    """

    def __init__(self) -> None:
        self.owners: dict[int, int] = {}
        self.own: dict[int, Shape] = {}

    def gather(
        self, parts: Mapping[int, Tensors], are_read: bool = True
    ) -> dict[int, Tensors]:
        """Return whole tensors of parameters, or only memory for them, flat.

        Their parts on this rank are given.
        """
        return {}

    def scatter(
        self, whole: Mapping[int, Tensors], parts: Mapping[int, Tensors]
    ) -> None:
        """Write this rank's parts of tensors of parameters to tensors, flat."""

    def add(self, values: Mapping[int, float]) -> dict[int, float]:
        """Return for each parameter the sum of a value over the ranks; a rank that does
        not give it counts as 0."""
        return {}

    def on_any_rank(self, indices: Iterable[int]) -> set[int]:
        """Return the parameters whose index any rank gives, once all ranks have called
        this."""
        return {
            index
            for index, count in self.add(dict.fromkeys(indices, 1.0)).items()
            if count
        }


def exchange_of(
    params: Sequence[torch.Tensor], rules: Sequence[UpdateRule]
) -> Exchange:
    """Return the exchange of parameters with these rules. Raises EngineError if one
    cannot be updated by its rule."""
    are_whole = [rule.whole_update is not None for rule in rules]
    if not any(are_whole):
        return Exchange()
    exchange: Exchange = seams.service("exchange")(params, are_whole)
    return exchange
