"""Forwards of layers that are computed again in the backward.

The backward compares all that it uses.

A layer's forward saves tensors. They are held until it ends: if it has changed anything
beside its outputs (effects.py), they stay, and it is not computed again. Else they are
released, and their fingerprints remain. Computing the forward again saves the same
tensors, whose fingerprints are compared before autograd has the first of them.
Gradients depend on nothing else, so that equal fingerprints are equal gradients;
outputs would not show a difference that a factor of 0 hides, or rounding, and computing
them takes longer, since recomputation ends with the last saved tensor.

In measured passes the saved tensors stay as well, and the gradients are computed from
them: a trial shows whether recomputation gives the same bits, by operations that torch
calls deterministic, and changes nothing of the job."""

import logging
import random
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from ebbtide.features.layers.engine.effects import Watch, global_states
from ebbtide.features.layers.engine.layer_pass import LayerPass
from ebbtide.features.layers.engine.model_layers import (
    LayerForward,
    is_compiled,
    other_hooks,
    storages_of,
)
from ebbtide.features.layers.engine.nondeterminism import OperationWatch
from ebbtide.features.layers.engine.saved_tensors import PackedTensor
from ebbtide.interleave.engine.devices.device import Mark
from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.numerics.tensor_fingerprint import fingerprint_tensor

log = logging.getLogger("ebbtide")

ON_DIFFERENCE = ("error", "warn")
# Type and shape of a saved tensor, and its fingerprint; None for inputs, parameters and
# buffers, whose versions count. Without a type its bits cannot be read.
_Print = tuple[torch.dtype | None, Any, torch.Tensor | None]


class RecomputedLayers:
    """Layers that can be computed again, and the reasons why others are not.

    Attributes:
        reasons: By layer that is not computed again.
        tried: Layers that were, in a trial, with the marks of the start and the end of
            each fingerprint.
    """

    def __init__(self, on_difference: str) -> None:
        if on_difference not in ON_DIFFERENCE:
            raise EngineError(
                f"on_difference={on_difference!r}: choose from "
                f"{', '.join(ON_DIFFERENCE)}"
            )
        self.on_difference = on_difference
        self.reasons: dict[LayerForward, str] = {}
        self.tried: dict[LayerForward, list[Mark]] = {}
        self._watches: dict[LayerForward, Watch] = {}

    def watch(self, layer: LayerForward) -> Watch:
        """Return a watch of all that a layer's module refers to."""
        watch = self._watches.get(layer)
        if watch is None or not watch.is_current():
            hooks = torch.nn.modules.module
            roots = [
                layer.module,
                layer.original,
                hooks._global_forward_hooks,
                hooks._global_forward_pre_hooks,
            ]
            watch = Watch("its module", roots)
            self._watches.pop(layer, None)
            if not watch.holds_others:
                self._watches[layer] = watch
        return watch

    def refuse(self, layer: LayerForward, reason: str) -> None:
        if layer not in self.reasons:
            self.reasons[layer] = reason
            log.info("ebbtide: layer %s is not recomputed: %s", layer.name, reason)

    def comparisons(self) -> dict[int, list[Mark]]:
        """Return the layers that can be computed again, with the marks of `tried`."""
        return {
            layer.number: marks
            for layer, marks in self.tried.items()
            if layer not in self.reasons
        }

    def refused(self) -> frozenset[int]:
        return frozenset(layer.number for layer in self.reasons)


class _SavedTensor:
    """A saved tensor: itself, and a function that computes it again; None without."""

    __slots__ = ("__weakref__", "again", "packed")

    def __init__(self, packed: PackedTensor, again: Callable[[], torch.Tensor]) -> None:
        self.packed: PackedTensor | None = packed
        self.again: Callable[[], torch.Tensor] | None = again


class Recomputation:
    """One forward of a layer, and what is computed again in its backward."""

    def __init__(
        self,
        owner: RecomputedLayers,
        one: LayerPass,
        layer: LayerForward,
        number: int,
        is_trial: bool,
    ) -> None:
        self._owner = owner
        self._one = one
        self._layer = layer
        self._number = number
        self._is_trial = is_trial
        self._hooks: Any = None
        self._saved: list[_SavedTensor] = []
        self._tried: weakref.WeakSet[_SavedTensor] = weakref.WeakSet()
        self._params = [(param, param._version) for param in layer.module.parameters()]
        self._buffers = {
            buffer.untyped_storage()._cdata for buffer in layer.module.buffers()
        }
        self._expected: list[_Print] = []
        self._again: list[_Print] | None = None
        # Where the streams of the layer were after each of these.
        self._ends: list[Mark] = []
        # Fingerprints of the storages of this forward, by place; they are held, since
        # others could have the same place.
        self._prints: dict[Any, tuple[torch.Tensor, _Print]] = {}
        self._marks: list[Mark] = []
        self._inputs: set[int] = set()

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute the forward."""
        leaves, self._spec = tree_flatten((args, kwargs))
        tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}
        places = {key: place for place, key in enumerate(tensors)}
        # Tensors that torch holds for the recomputation, by place, and everything else.
        self._leaves = [
            (places.get(id(leaf)), None if id(leaf) in places else leaf)
            for leaf in leaves
        ]
        self._call: Any = args, kwargs
        watch = self._owner.watch(self._layer)
        watches = [watch, Watch("an input", [*args, *kwargs.values()], watch)]
        for one in watches:
            one.begin()
        states = global_states()
        try:
            with saved_tensors_hooks(self._one.save, self._one.load):
                output = checkpoint(
                    self._compute, *tensors.values(), use_reentrant=False
                )
            self._end_forward(self._effect(watches, states))
        finally:
            # torch's hooks refer to this.
            self._saved.clear()
            self._prints.clear()
            self._hooks = None
        return output

    def _effect(self, watches: Sequence[Watch], states: Sequence[Any]) -> str:
        """Return why a forward cannot be computed again.

        Return an empty text if nothing is known against it.
        """
        if global_states() != states:
            return "its forward draws from the generator of random or NumPy"
        changes = [change for watch in watches if (change := watch.change())]
        if changes:
            return f"its forward changes {changes[0]}"
        is_readable = all(dtype is not None for dtype, _, _ in self._expected)
        return "" if is_readable else "it saves a tensor whose bits cannot be compared"

    def _end_forward(self, reason: str) -> None:
        """Keep what is saved, or leave it to recomputation."""
        if reason:
            self._owner.refuse(self._layer, reason)
            self._is_trial = False
            self._leaves.clear()
            self._one.keep(self._number)
        for saved in self._saved:
            if reason:
                saved.again = None
            elif self._is_trial:
                self._tried.add(saved)
            else:
                saved.packed = None

    def _compute(self, *inputs: torch.Tensor) -> Any:
        self._inputs = {
            tensor.untyped_storage()._cdata
            for tensor in inputs
            if type(tensor) is torch.Tensor
        }
        if self._call is not None:
            (args, kwargs), self._call = self._call, None
            self._hooks = other_hooks()
            with saved_tensors_hooks(self._save, self._load):
                return self._layer.compute(args, kwargs)
        self._again = []
        if any(param._version != version for param, version in self._params):
            raise EngineError(
                f"layer {self._layer.name}: a parameter was modified in place between "
                "its forward and its backward, "
                "which computes it again. No gradient was computed from it"
            )
        # A sharded layer has gathered its parameters again.
        self._one.own_of_layer = storages_of(self._layer.module)
        save, load = other_hooks()
        args, kwargs = tree_unflatten(
            [leaf if place is None else inputs[place] for place, leaf in self._leaves],
            self._spec,
        )
        with saved_tensors_hooks(
            lambda tensor: save(self._compared(self._one.counted(tensor))), load
        ):
            return self._layer.compute(args, kwargs)

    def _save(self, tensor: torch.Tensor) -> _SavedTensor:
        pack, unpack = self._hooks
        saved = _SavedTensor(self._one.save(tensor), partial(unpack, pack(tensor)))
        self._saved.append(saved)
        self._expected.append(self._print(tensor))
        return saved

    def _compared(self, tensor: torch.Tensor) -> torch.Tensor:
        assert self._again is not None
        self._again.append(self._print(tensor))
        self._ends.append(self._one.record())
        return tensor

    def _print(self, tensor: torch.Tensor) -> _Print:
        """Return type, shape and fingerprint of a tensor that the forward saves."""
        if (
            type(tensor) not in (torch.Tensor, torch.nn.Parameter)
            or tensor.layout != torch.strided
        ):
            return self._print_new(tensor)
        key = tensor.untyped_storage()._cdata
        if key in self._inputs or self._one.is_own(key):
            # Writes to parameters and inputs are errors before, as autograd's are.
            return (
                tensor.dtype,
                (tensor.shape, key in self._buffers and tensor._version),
                None,
            )
        place = (
            key,
            tensor.dtype,
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
            tensor._version,
        )
        if place not in self._prints:
            self._prints[place] = tensor.detach(), self._print_new(tensor)
        _, result = self._prints[place]
        return result

    def _print_new(self, tensor: torch.Tensor) -> _Print:
        marks = self._marks if self._is_trial and self._again is None else []
        marks.append(self._one.record())
        with torch.no_grad():
            fingerprint = fingerprint_tensor(tensor)
        marks.append(self._one.record())
        return (
            (None if fingerprint is None else tensor.dtype),
            tensor.shape,
            fingerprint,
        )

    def _load(self, saved: _SavedTensor) -> torch.Tensor:
        """Return a tensor for the backward. Raises EngineError where recomputation
        differs."""
        if self._hooks is not None and saved.packed is not None:
            # A backward within the forward.
            return self._one.load(saved.packed)
        if self._is_trial:
            self._is_trial = False
            with self._one.left_out():
                self._try(saved)
        if saved.packed is not None:
            return self._one.load(saved.packed)
        self._forget()
        try:
            assert saved.again is not None
            tensor = saved.again()
        except (EngineError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if self._again is None:
                raise
            raise self._error(
                f"ends in {type(error).__name__}: {_first_line(error)}"
            ) from error
        finally:
            self._prints.clear()
        if self._again is not None and not self._is_same():
            difference = self._error("gives other values than its forward")
            if self._owner.on_difference == "error":
                raise difference
            log.warning(
                "ebbtide: layer %s: computing it again gives other values, which are "
                "used",
                self._layer.name,
            )
        return self._one.share(tensor)

    def _forget(self) -> None:
        """Forget what an earlier backward has computed again."""
        self._again = None
        self._ends.clear()

    def _error(self, difference: str) -> EngineError:
        self._owner.refuse(self._layer, f"computing it again {difference}")
        return EngineError(
            f"layer {self._layer.name}: computing it again {difference}. No gradient "
            "was computed from it: use "
            'activations="offload"'
        )

    def _is_same(self) -> bool:
        """Return whether recomputation saved the same bits; waits for the device."""
        assert self._again is not None
        # Computing a layer again ends with what it saves last, before it lets its own
        # streams meet.
        self._one.wait(self._ends)
        self._ends.clear()
        pairs: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for expected, again in zip(self._expected, self._again, strict=False):
            *meta, one = expected
            *other_meta, other = again
            if meta != other_meta or (one is None) != (other is None):
                return False
            if one is not None and other is not None:
                pairs.setdefault(one.device, []).append((one, other))
        return all(
            torch.equal(*map(torch.stack, zip(*some, strict=True)))
            for some in pairs.values()
        )

    def _try(self, saved: _SavedTensor) -> None:
        """Compute the layer again, and compare. What it draws from generators is put
        back."""
        operations, states = (
            OperationWatch(),
            (random.getstate(), np.random.get_state()),
        )
        self._forget()
        reason = ""
        try:
            with nullcontext() if is_compiled(self._layer.module) else operations:
                assert saved.again is not None
                saved.again()
            if not self._is_same():
                reason = "computing it again gives other values"
        except Exception as error:
            reason = (
                f"computing it again ends in {type(error).__name__}: "
                f"{_first_line(error)}"
            )
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            for one in self._tried:
                one.again = None
            self._prints.clear()
            self._leaves.clear()
        if operations.restore():
            reason = "it draws from a generator of its own"
        if operations.name:
            reason = f"torch lists its operation {operations.name} as nondeterministic"
        if reason:
            self._owner.refuse(self._layer, reason)
        else:
            self._owner.tried[self._layer] = self._marks


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
