"""The attributes `state` and `load_state_dict` of driven optimizers.

Both are as torch's, in torch's layout, wherever the state is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from ebbtide.features.run.driver.groups import params_of
from ebbtide.interleave.engine.numerics.tensor_fingerprint import fingerprint_tensor
from ebbtide.interleave.engine.params.local_shards import local_shard

State = dict[Any, dict[str, Any]]


class StateAttribute:
    """The attribute `state` of a class of optimizers, in the object's `__dict__`, as
    torch has it.

    While an engine has the state, a reader gets a copy on the host; what it changes
    there is taken at the next step."""

    def __init__(self, export: Callable[[Any], State | None]) -> None:
        self._export = export

    def __get__(self, optimizer: Any, owner: Any = None) -> Any:
        if optimizer is not None:
            state = optimizer.__dict__.get("state")
            if state is None:
                state = self._export(optimizer)
            if state is not None:
                return state
        # Objects that imitate the class, and pass on what they do not have, go on.
        raise AttributeError("state")

    def __set__(self, optimizer: Any, value: Any) -> None:
        optimizer.__dict__["state"] = value


def loading_as_torch(original: Callable[..., None]) -> Callable[..., None]:
    """Return a `load_state_dict` that keeps tensors where and as they are.

    Torch would cast them to the type of the parameters, and move them to their device.
    Torch itself loads the groups, with a state that is empty.
    """

    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        loaded: dict[Any, Any] = {}

        def take_state(_: Any, given: dict[str, Any]) -> dict[str, Any]:
            loaded.update(given["state"])
            return {**given, "state": {}}

        handle = self.register_load_state_dict_pre_hook(take_state)
        try:
            original(self, state_dict)
        finally:
            handle.remove()
        groups = state_dict["param_groups"]
        names = [name for group in groups for name in group["params"]]
        pairs = zip(names, params_of(self), strict=True)
        own = {param: dict(loaded[name]) for name, param in pairs if name in loaded}
        others = {key: loaded[key] for key in loaded.keys() - names}
        self.state = defaultdict(dict, {**own, **others})

    return load_state_dict


def torch_layout(
    entries: dict[torch.Tensor, dict[str, Any]], groups: list[dict[str, Any]]
) -> State:
    """Return entries of an engine as torch has them."""
    group_of = {param: group for group in groups for param in group["params"]}
    state: State = defaultdict(dict)
    for param, entry in entries.items():
        group = group_of.get(param)
        if group is None:
            continue
        if "momentum_buffer" in entry:
            # SGD and Muon count no steps, and have no masters.
            del entry["step"]
            entry.pop("master", None)
        elif group.get("fused") or group.get("capturable"):
            entry["step"] = entry["step"].to(local_shard(param).device)
        state[param] = entry
    return state


def move_to_params(state: State) -> None:
    """Give the moments of a state the types and devices of their parameters.

    Torch does so when it loads a state.
    """
    for param, entry in state.items():
        shard = local_shard(param)
        for name, value in entry.items():
            if name != "step" and isinstance(value, torch.Tensor):
                entry[name] = value.to(device=shard.device, dtype=shard.dtype)


def contents(state: State) -> list[tuple[Any, ...]]:
    """Return what shows whether somebody has written to a state.

    Writes through `data`, an array of NumPy or a DTensor count no version.
    """
    return [
        (id(param), name, id(value), _fingerprint(value))
        for param, entry in state.items()
        for name, value in entry.items()
    ]


def _fingerprint(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    words = fingerprint_tensor(value)
    return value._version if words is None else words.tolist()
