"""Lists the memory of parameters, buffers, gradients and optimizer state, by module.
Reads the job's objects only."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import Any, Callable

from .framework_objects import (
    content,
    fp32_masters,
    further_gradients,
    own_state,
    torch_optimizers,
)

_MAX_HOLDERS = 1000
_MAX_DEPTH = 4
# Modules that contain the model under this attribute; its parts keep the names that
# they have in the model.
_WRAPPERS = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "OptimizedModule": "_orig_mod",
}

PARAMETER, BUFFER, GRADIENT, STATE = (
    "parameter",
    "buffer",
    "gradient",
    "optimizer_state",
)


def _data_address(storage: Any) -> int:
    return int(storage.data_ptr())


def list_holders(
    modules: Iterable[Any], optimizers: Iterable[Any], failed_on: str | None = None
) -> list[dict[str, Any]]:
    """Return all holders of memory, the largest first.

    Each has `device`, `category`, `module` (None: not known) and `bytes`. Each storage
    counts once, for the first tensor in the order of parameters, buffers, gradients and
    optimizer state; gradients and state count for the module of their parameter. Of a
    shared storage, each tensor counts with its own part, and the rest for no module.
    Where a backward has just failed on the device `failed_on`, autograd's threads of
    other devices may still replace gradients: these are left out unless all parameters
    are on this device.
    """
    return _largest_first(
        _collect_storages(modules, optimizers, _data_address, failed_on).sizes()
    )


def list_blocks(
    modules: Iterable[Any],
    optimizers: Iterable[Any],
    address_of: Callable[[Any], int] = _data_address,
) -> list[tuple[int, int, str, str | None]]:
    """Return (address, bytes, category, module) of the storages of a model and its
    optimizers.

    A shared one has the category of its first tensor, and the module None. `address_of`
    returns the address of a storage, 0 for one without memory."""
    return _collect_storages(modules, optimizers, address_of).blocks()


def _collect_storages(
    modules: Iterable[Any],
    optimizers: Iterable[Any],
    address_of: Callable[[Any], int],
    failed_on: str | None = None,
) -> _Storages:
    # Tensors must not notice uses: the class of some waits in functions of torch.
    disable = getattr(
        getattr(sys.modules.get("torch"), "_C", None),
        "DisableTorchFunctionSubclass",
        nullcontext,
    )
    with disable():
        return _collect_without_overrides(
            list(modules), list(optimizers), address_of, failed_on
        )


def _collect_without_overrides(
    modules: list[Any],
    optimizers: list[Any],
    address_of: Callable[[Any], int],
    failed_on: str | None,
) -> _Storages:
    storages = _Storages(address_of)
    names, parameters, buffers = _tensors_of(modules)
    inner_optimizers = {
        id(inner): inner
        for optimizer in optimizers
        for inner in torch_optimizers(optimizer)
    }
    masters = {
        id(master): master
        for optimizer in optimizers
        for master in fp32_masters(optimizer) or ()
    }
    for optimizer in inner_optimizers.values():
        for group in getattr(optimizer, "param_groups", ()):
            parameters.update(
                (id(p), p) for p in group["params"] if id(p) not in masters
            )
    for key, parameter in parameters.items():
        storages.add(getattr(parameter, "ds_tensor", None), PARAMETER, names.get(key))
        storages.add(parameter, PARAMETER, names.get(key))
    for buffer, name in buffers:
        storages.add(buffer, BUFFER, name)
    if failed_on is None or all(
        str(parameter.device) == failed_on for parameter in parameters.values()
    ):
        for key, parameter in (*parameters.items(), *masters.items()):
            storages.add(parameter.grad, GRADIENT, names.get(key))
    for optimizer in optimizers:
        storages.add(further_gradients(optimizer), GRADIENT, None)
    for master in masters.values():
        storages.add(master, STATE, None)
    for optimizer in inner_optimizers.values():
        _add_states(storages, optimizer, names)
    return storages


def _tensors_of(
    modules: list[Any],
) -> tuple[dict[int, str], dict[int, Any], list[tuple[Any, str]]]:
    """Return modules of parameters, parameters, and buffers with their modules.

    Modules are given by name. The first two are by the id of the parameter.
    """
    names: dict[int, str] = {}
    parameters: dict[int, Any] = {}
    buffers: list[tuple[Any, str]] = []
    for name, module in _named_modules(modules):
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) not in names:
                names[id(parameter)] = name
                parameters[id(parameter)] = parameter
        buffers += [
            (buffer, name) for buffer in module._buffers.values() if buffer is not None
        ]
    return names, parameters, buffers


def _add_states(storages: _Storages, optimizer: Any, names: dict[int, str]) -> None:
    """Add the state of an optimizer, by the modules of its parameters."""
    for parameter, state in own_state(optimizer).items():
        storages.add(state, STATE, names.get(id(parameter)))
    for _, tensor in getattr(optimizer, "ebbtide_state", ()):
        storages.add(tensor, STATE, None)


class _Storages:
    """The storages of tensors, each with the parts that tensors use."""

    def __init__(self, address_of: Callable[[Any], int]) -> None:
        self._address_of = address_of
        # (device, address) -> (bytes, {(offset, bytes of a tensor): its holder})
        self._storages: dict[
            tuple[Any, int], tuple[int, dict[tuple[int, int], Any]]
        ] = {}

    def add(
        self, value: Any, category: str, module: str | None, depth: int = 0
    ) -> None:
        """Add a tensor, or the tensors in a container; ignore anything else."""
        if hasattr(value, "untyped_storage"):
            flatten = getattr(value, "__tensor_flatten__", None)
            if flatten is None:
                self._add_tensor(value, category, module)
            else:  # a tensor that consists of others, such as a DTensor
                for name in flatten()[0] if depth < _MAX_DEPTH else ():
                    self.add(getattr(value, name), category, module, depth + 1)
        elif isinstance(value, (dict, list, tuple)) and depth < _MAX_DEPTH:
            for item in value.values() if isinstance(value, dict) else value:
                self.add(item, category, module, depth + 1)

    def _add_tensor(self, tensor: Any, category: str, module: str | None) -> None:
        try:
            storage = tensor.untyped_storage()
            address, size = self._address_of(storage), storage.nbytes()
        except (RuntimeError, NotImplementedError):
            return  # a tensor without memory, such as a fake one
        if not address or not size:
            return
        device = tensor.device
        _, parts = self._storages.setdefault((device, address), (size, {}))
        item_bytes = tensor.element_size()
        part = tensor.storage_offset() * item_bytes, tensor.numel() * item_bytes
        parts.setdefault(part, (device, category, module))

    def blocks(self) -> list[tuple[int, int, str, str | None]]:
        """Return (address, bytes, category, module) of each storage."""
        entries = []
        for (_, address), (size, parts) in self._storages.items():
            _, category, module = next(iter(parts.values()))
            entries.append(
                (address, size, category, module if len(parts) == 1 else None)
            )
        return entries

    def sizes(self) -> Counter[Any]:
        """Return the bytes of each holder.

        A holder is a device of torch, a category, and a module or None.
        """
        sizes: Counter[Any] = Counter()
        for size, parts in self._storages.values():
            if len(parts) == 1:
                sizes[next(iter(parts.values()))] += size
                continue
            rest = size
            for (_, part_bytes), holder in parts.items():
                sizes[holder] += min(part_bytes, rest)
                rest -= min(part_bytes, rest)
            if rest:
                device, category, _ = next(iter(parts.values()))
                sizes[device, category, None] += rest
        return sizes


def _named_modules(roots: list[Any]) -> Iterator[tuple[str, Any]]:
    """Yield each module once, by its dotted name in the model.

    Left out are the modules that only wrap others.
    """
    roots = list({id(root): root for root in roots}.values())
    inner = {id(part) for root in roots for part in root.modules() if part is not root}
    roots = [root for root in roots if id(root) not in inner]
    several = sum(next(root.parameters(), None) is not None for root in roots) > 1
    done: set[int] = set()
    for root in roots:
        while (content := _content(root)) is not None:
            yield type(content).__name__, root
            root = content
        pending = [(type(root).__name__ if several else "", root)]
        while pending:
            name, module = pending.pop()
            if id(module) in done:
                continue
            done.add(id(module))
            yield name or type(module).__name__, module
            wrapped = _content(module)
            for child_name, child in reversed(module._modules.items()):
                if child is not None:
                    child_path = f"{name}.{child_name}" if name else child_name
                    pending.append((name if child is wrapped else child_path, child))


def _content(module: Any) -> Any:
    """Return the module that a wrapper contains; None if this is no wrapper."""
    inner = content(module)
    if inner is None and (attribute := _WRAPPERS.get(type(module).__name__)):
        inner = module._modules.get(attribute)
    return inner


def _largest_first(sizes: Counter[Any]) -> list[dict[str, Any]]:
    """Return the holders by size.

    If there are too many, modules are summed up in their parents, the deepest first.
    """
    while len(sizes) > _MAX_HOLDERS:
        depth = max(module.count(".") for _, _, module in sizes if module is not None)
        if not depth:
            break
        parents: Counter[Any] = Counter()
        for (device, category, module), size in sizes.items():
            if module is not None and module.count(".") == depth:
                module = module.rpartition(".")[0]
            parents[device, category, module] += size
        sizes = parents
    return [
        {"device": str(device), "category": category, "module": module, "bytes": size}
        for (device, category, module), size in sizes.most_common(_MAX_HOLDERS)
    ]
