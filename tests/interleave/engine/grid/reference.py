"""An optimizer without plans, which defines the bits of every rule on the host."""

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import distribute_tensor

from ebbtide.features.rules.remainder import split_tensor
from ebbtide.interleave.engine.numerics import reference
from ebbtide.interleave.engine.numerics.norm import sum_of_squares, total
from ebbtide.interleave.engine.numerics.reference import LossScale
from ebbtide.interleave.engine.numerics.rounding import FACTOR
from ebbtide.interleave.engine.params.local_shards import (
    flat_like,
    flat_view,
    local_shard,
)
from ebbtide.interleave.engine.rules.rule import GroupRules
from tests.interleave.engine.states import bits


class ReferenceParam:
    """The state of a parameter: fp32 master and moments, flat, in the order of the
    parameter's memory.

    That of a matrix whose rule needs all of it is whole on all ranks.
    """

    def __init__(self, param: torch.Tensor, rule: Any) -> None:
        self.param, self.rule, self._factors = param, rule.with_masters, rule.scalars
        self.has_remainders, self.has_masters = rule.split is not None, rule.has_masters
        self.step = 0
        self.is_whole = rule.whole_update is not None and hasattr(param, "full_tensor")
        value = self._value()
        self.rows = list(self.rule.zero_rows(len(value)))
        self.rows[0].copy_(value)
        self.written = value.clone()
        # What the masters of a loaded state round to, until the next step.
        self.loaded: torch.Tensor | None = None

    def follow(self) -> None:
        """Let masters follow what the job has written to the parameter."""
        value, master = self._value(), self.rows[0]
        if self.has_remainders:
            self._follow_remainders(value, master)
        else:
            differs = bits(master.to(value.dtype)) != bits(value)
            master[differs] = value[differs].float()
        self._write(value)

    def _value(self) -> torch.Tensor:
        """Return the parameter's values, flat, on the host: a view where it is there
        and needs only its shard."""
        if self.is_whole:
            return self.param.detach().full_tensor().flatten()
        return flat_view(self.param).cpu()

    def _write(self, value: torch.Tensor) -> None:
        """Give the parameter its values."""
        if self.is_whole:
            local_shard(self.param.detach()).copy_(
                self._own(value).view_as(local_shard(self.param))
            )
        else:
            if self.param.is_cuda:
                flat_view(self.param).copy_(value)
            # Optimizers of torch do.
            torch.autograd.graph.increment_version([self.param])
        self.written = value.clone()

    def _own(self, row: torch.Tensor) -> torch.Tensor:
        """Return the elements of a row that this rank has."""
        if not self.is_whole:
            return row
        whole = row.view(self.param.shape)
        return (
            distribute_tensor(whole, self.param.device_mesh, self.param.placements)
            .to_local()
            .flatten()
        )

    def own_rows(self) -> list[torch.Tensor]:
        """Return the elements of the rows of `entry` that a state dict of this rank
        has."""
        rows = self.entry()["rows"]
        return [self._own(row) for row in (rows if self.has_masters else rows[1:])]

    @property
    def gradient(self) -> torch.Tensor:
        """The gradient, flat, in the order of the parameter's memory."""
        if self.is_whole:
            return self.param.grad.full_tensor().flatten()
        return flat_like(local_shard(self.param.grad), self.param).cpu()

    def _follow_remainders(self, value: torch.Tensor, master: torch.Tensor) -> None:
        """Masters whose remainder belongs to another parameter start again; nobody
        knows which elements changed."""
        if self.loaded is not None:
            to_even = master.to(value.dtype)
            differs = (bits(self.loaded) != bits(value)) & (
                bits(to_even) != bits(value)
            )
            value.copy_(torch.where(differs, value, self.loaded))
            master[differs] = value[differs].float()
            self.loaded = None
        elif not torch.equal(bits(value), bits(self.written)):
            master.copy_(value)

    def update(self, group: dict[str, Any], scale: float, number: int) -> None:
        """Update the parameter, which has a number in the optimizer, by its
        gradient."""
        self.step += 1
        value = self._value()
        shape = tuple(self.param.shape) if self.rule.whole_update is not None else None
        scalars, position = self._factors(group, self.step, scale), number * FACTOR
        out = None if self.has_remainders or not self.has_masters else value
        rows = self.rows if self.has_masters else [value, *self.rows[1:]]
        reference.update(self.gradient, rows, out, scalars, self.rule, position, shape)
        if self.has_remainders:
            rounded, _ = split_tensor(self.rows[0])
            value.copy_(rounded)
            is_nan = torch.isnan(rounded)
            self.rows[0][is_nan] = rounded[is_nan].float()
        self._write(value)

    def entry(self) -> dict[str, Any]:
        """Return the entry of a state dict."""
        rows = [row.clone() for row in self.rows]
        value = self._value()
        is_changed = not torch.equal(bits(value), bits(self.written))
        if self.has_remainders and is_changed and self.loaded is None:
            rows[0].copy_(value)
        return {"step": self.step, "rows": rows}

    def load(self, entry: dict[str, Any]) -> None:
        self.step = entry["step"]
        self.rows = [row.clone() for row in entry["rows"]]
        self.loaded = split_tensor(self.rows[0])[0] if self.has_remainders else None


class ReferenceOptimizer(torch.optim.Optimizer):  # type: ignore[misc]
    """The results of InterleavedOptimizer without any plan, one parameter after the
    other."""

    def __init__(
        self,
        groups: Any,
        rule: str,
        *,
        max_grad_norm: float | None = None,
        loss_scale: float | str | None = None,
        **hyperparameters: Any,
    ) -> None:
        self._rules = GroupRules(rule, hyperparameters)
        self._max_norm = max_grad_norm
        self._loss_scale = LossScale(loss_scale)
        self._states: dict[torch.Tensor, ReferenceParam] = {}
        self._own: list[torch.Tensor] = []
        super().__init__(groups, self._rules.defaults)
        self._take_params()

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * self._loss_scale.value

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(self._rules.checked(param_group))
        self._rules.drop_other_defaults(self.param_groups[-1])
        if self._own:
            self._take_params()

    def step(self, closure: None = None) -> None:
        groups = {
            param: group for group in self.param_groups for param in group["params"]
        }
        if any(
            param.grad is not None and param not in self._states
            for param in groups
            if param.requires_grad
        ):
            self._take_params()
        for state in self._states.values():
            state.follow()
        updated = [param for param in self._own if param.grad is not None]
        norm = math.sqrt(total(self._sums(updated))) / self._loss_scale.value
        if not math.isfinite(norm):
            self._loss_scale.update(False)
            return
        clip = (
            1.0 if self._max_norm is None else min(1.0, self._max_norm / (norm + 1e-6))
        )
        for number, param in enumerate(self._own):
            if param.grad is not None:
                group = self._rules.checked(groups[param])
                self._states[param].update(group, clip / self._loss_scale.value, number)
        self._loss_scale.update(True)

    def state_dict(self) -> dict[str, Any]:
        entries = [
            self._states[param].entry() if param in self._states else None
            for param in self._params()
        ]
        groups = [
            {key: value for key, value in group.items() if key != "params"}
            for group in self.param_groups
        ]
        return {
            "entries": entries,
            "groups": groups,
            "loss_scale": self._loss_scale.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for param, entry in zip(self._params(), state_dict["entries"], strict=True):
            if entry is not None and entry["step"]:
                self._states.setdefault(param, self._new_state(param)).load(entry)
            elif param in self._states:
                self._states[param] = self._new_state(param)
        # A frozen parameter that has state counts among those that are rounded by their
        # number.
        self._take_params()
        for group, saved in zip(self.param_groups, state_dict["groups"], strict=True):
            group.update(saved)
        self._loss_scale.load_state_dict(state_dict["loss_scale"])

    def rows(self) -> list[torch.Tensor]:
        """Return the state of each parameter that was updated, in the order of the
        groups."""
        states = [
            self._states[param] for param in self._params() if param in self._states
        ]
        return [row for state in states if state.step for row in state.own_rows()]

    @property
    def updates(self) -> int:
        """The number of updates that parameters have had."""
        return sum(state.step for state in self._states.values())

    def close(self) -> None:
        """Do nothing: there is nothing to release."""

    def _params(self) -> list[torch.Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def _take_params(self) -> None:
        self._own = [
            param
            for param in self._params()
            if param.requires_grad or param in self._states
        ]
        for param in self._own:
            self._states.setdefault(param, self._new_state(param))

    def _new_state(self, param: torch.Tensor) -> ReferenceParam:
        return ReferenceParam(param, self._rules.by_param(self.param_groups)[param])

    def _sums(self, params: Iterable[torch.Tensor]) -> list[float]:
        """Return the sums of squares of gradients; those of shards are of all ranks."""
        sums, own = [], []
        for param in params:
            state = self._states[param]
            is_part = hasattr(param, "to_local") and not state.is_whole
            (own if is_part else sums).append(sum_of_squares(state.gradient))
        if own:
            of_ranks: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(of_ranks, total(own))
            sums.append(total(of_ranks))
        return sums
