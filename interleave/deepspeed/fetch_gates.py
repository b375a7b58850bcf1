"""Lets gathers of ZeRO stage 3 wait for parameters that late operations have not written yet."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ebbtide.interleave.engine.gates.method_gate import MethodGate


class FetchGates:
    """Gates of the functions of each parameter that gather parameters: of modules, prefetches and GatheredParameters.

    A gather reads the parts of all parameters in its list, before autograd sees anything of it. A gate delays it; it
    never leaves one out or changes the order.

    Args:
        params: All parameters of the model, since DeepSpeed calls the function of any one in a list.
        wait: Waits until parameters are written.
    """

    def __init__(self, params: Iterable[Any], wait: Callable[[Sequence[Any]], None]) -> None:
        self._gates = []
        for param in params:

            def before_gather(param_list: Sequence[Any] | None = None, *_: Any, param: Any = param, **__: Any) -> None:
                wait([param] if param_list is None else param_list)

            self._gates.append(MethodGate(param, "all_gather", before_gather))
            self._gates.append(MethodGate(param, "all_gather_coalesced", lambda params, *_, **__: wait(params)))

    def remove(self) -> None:
        """Remove the gates."""
        for gate in self._gates:
            gate.remove()
