"""Operations whose results torch does not guarantee to be the same in each call.

The table is the part of the lists of `torch.use_deterministic_algorithms`
(documentation of torch 2.13) that concerns forwards: torch exposes no list, and its
alerts need a global setting that changes results. Operations that torch itself marks
(`torch.Tag.nondeterministic_bitwise`) count, too. With
`use_deterministic_algorithms(True)` none does."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# By name in torch.ops.aten: whether on the CPU, too.
_NONDETERMINISTIC = {
    "bincount": False,
    "cumsum": False,
    "cumsum_": False,
    "histc": False,
    "index_add": False,
    "index_add_": False,
    "index_copy": False,
    "index_copy_": False,
    "index_put": False,
    "index_put_": False,
    "_index_put_impl_": False,
    "_unsafe_index_put": False,
    "max_unpool2d": True,
    "max_unpool3d": True,
    "median": False,
    "nanmedian": False,
    "nll_loss2d_forward": False,
    "put": True,
    "put_": True,
    "scatter": False,
    "scatter_": False,
    "scatter_add": False,
    "scatter_add_": False,
    "scatter_reduce": False,
    "scatter_reduce_": False,
}
_MARK = getattr(torch.Tag, "nondeterministic_bitwise", None)


class OperationWatch(TorchDispatchMode):  # type: ignore[misc]
    """Sees operations that are not deterministic, and puts back the states of
    generators that are given to operations.

    Attributes:
        name: The first of these operations; empty without one.
        generators: States of the generators before their first use.
    """

    def __init__(self) -> None:
        super().__init__()
        self.name = ""
        self.generators: dict[torch.Generator, torch.Tensor] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled functions run as they do without a mode."""
        return True

    def __torch_dispatch__(
        self,
        function: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        for leaf in (*args, *kwargs.values()):
            if isinstance(leaf, torch.Generator):
                self.generators.setdefault(leaf, leaf.get_state())
        if not self.name and not torch.are_deterministic_algorithms_enabled():
            name = function.name().partition("::")[2].partition(".")[0]
            on_cpu = _NONDETERMINISTIC.get(name)
            if (
                _MARK in function.tags
                or on_cpu
                or (on_cpu is False and _is_on_gpu(args))
            ):
                self.name = name
        return function(*args, **kwargs)

    def restore(self) -> bool:
        """Put the states of generators back. Return whether any was drawn from."""
        for generator, state in self.generators.items():
            generator.set_state(state)
        return bool(self.generators)


def _is_on_gpu(args: Any) -> bool:
    tensors = (leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor))
    return any(tensor.device.type not in ("cpu", "meta") for tensor in tensors)
