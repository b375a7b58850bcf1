"""The parameters of an optimizer on an engine.

The engine is opened at the first use and follows what the job changes.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from ebbtide.interleave.engine.adaptive.runner import AdaptiveRunner
from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.params import state_dict
from ebbtide.interleave.engine.params.exchange import Exchange, exchange_of
from ebbtide.interleave.engine.params.gradients import GradientCollector, GradientNorm
from ebbtide.interleave.engine.params.local_shards import (
    are_same,
    check_apart,
    check_params,
    device_of,
    flat_like,
    flat_view,
    local_shard,
    own_rank,
)
from ebbtide.interleave.engine.params.step_calls import StepCalls
from ebbtide.interleave.engine.rules.rule import Scalars, UpdateRule
from ebbtide.interleave.engine.runtime.engine import Engine
from ebbtide.interleave.engine.runtime.layout import Subgroup, divide
from ebbtide.interleave.engine.runtime.update import UpdatePhase

log = logging.getLogger("ebbtide")

# Device, dtype, shape and strides of a parameter.
_Layout = tuple[torch.device, torch.dtype, torch.Size, tuple[int, ...]]


class OffloadedParams:
    """The parameters that an engine updates. Until the first step they may move, or
    change their dtype. Those that the job has changed are found by their fingerprints
    at every step, and their masters follow."""

    norm: GradientNorm
    collector: GradientCollector

    def __init__(
        self,
        runner: AdaptiveRunner,
        expected_scalars: Callable[[], Sequence[Scalars | None] | None],
        rule_of_params: Callable[[], Mapping[torch.Tensor, UpdateRule]],
    ) -> None:
        # The parameters, in the order of their indices; none before the engine is
        # opened.
        self.params: list[torch.Tensor] = []
        # The rules that they had then, by index.
        self.own_rules: list[UpdateRule] = []
        # Whether the parameters of the constructor were checked or opened.
        self.is_checked = False
        self.calls = StepCalls(runner)
        self.exchange = Exchange()
        self._runner = runner
        self._options = runner.options
        self._expected_scalars = expected_scalars
        self._rule_of_params = rule_of_params
        self._layouts: list[_Layout] = []
        # Where the parameters were at the last step.
        self._addresses: list[int] = []
        self._device: torch.device | None = None
        # Whether parameters have state besides the initial one, and whether a step was
        # done.
        self._has_state = False
        self._has_stepped = False
        # By index, what waits for the fingerprints of values that masters round to, and
        # its place among them.
        self._fingerprints: dict[int, tuple[Callable[[], list[bytes]], int]] = {}
        # Parameters whose masters were loaded and compared with them by no step yet,
        # since the job may load parameters later. Where masters are in two parts: the
        # parameters that they were split into.
        self._loaded: dict[int, torch.Tensor | None] = {}

    def plan_or_open(self, params: Sequence[torch.Tensor]) -> None:
        """Open the engine for new parameters.

        If they may still move, only `check` that there is a plan.
        """
        self.check(params)
        if (
            self._options.device is None and device_of(params).type == "cpu"
        ) or self._runner.backing.is_used:
            # With storage, since a checkpoint that is loaded next may name the file to
            # use.
            self._runner.check(
                self._divide(params, exchange_of(params, self._rules(params)))
            )
        else:
            self._set_params(params)
        self.is_checked = True

    def check(self, params: Sequence[torch.Tensor]) -> None:
        """Check parameters. Raises EngineError if an engine cannot update them."""
        check_params(params, self._options.streamed)
        for param, rule in zip(params, self._rules(params), strict=True):
            if rule.split is not None and param.dtype != rule.split.param_dtype:
                raise EngineError(
                    f"a parameter is {param.dtype}: {rule.name} is for "
                    f"{rule.split.param_dtype} parameters; use "
                    f"{rule.with_masters.name} for others"
                )
        exchange_of(params, self._rules(params))
        if device_of(params).type != "cpu" and any(
            rule.whole_update is not None for rule in self._rules(params)
        ):
            raise EngineError(
                "rules of whole parameters run on the CPU only: use another rule for "
                "parameters on a GPU"
            )

    def check_rules(self) -> None:
        """Raise EngineError if the job has given a parameter another rule.

        The parameter does not have the state of that rule.
        """
        for own_rule, rule in zip(
            self.own_rules, self._rules(self.params), strict=True
        ):
            if rule.name != own_rule.name:
                raise EngineError(
                    f"the rule of a parameter was {own_rule.name} when the optimizer "
                    f"took it, and is {rule.name} now: "
                    "change it back, or create a new optimizer"
                )

    def open(self, params: Sequence[torch.Tensor]) -> Engine:
        """Return the engine; if it is not open, open it for these parameters. Raises
        EngineError if it is closed."""
        if not self.params:
            self.check(params)
            self._set_params(params)
        return self._runner.engine

    def add(self, params: Sequence[torch.Tensor]) -> None:
        """Update these parameters from now on. Those that the engine already has keep
        their state."""
        self.check(params)
        if self.params:
            states = dict(zip(self.params, self.gather(), strict=True))
            self._stop()
            self._set_params(params, [states.get(param) for param in params])

    def gather(self) -> list[state_dict.ParamState]:
        """Return the state of every parameter after the last step, in new host memory.
        The plan goes on afterwards."""
        self.calls.finish()
        if not self.params:
            return []
        engine, own, rules = self._runner.engine, self._values(), self.own_rules
        values, has_parts = (
            self._whole_values(own, False),
            any(rule.split is not None for rule in rules),
        )
        with engine.paused():
            changed = self._changed(own) if has_parts else set()
            changed |= self.exchange.on_any_rank(changed)
            states = state_dict.gather_states(
                rules, engine.store.states, values, changed, self._loaded
            )
        whole = {index: states[index] for index in self.exchange.owners}
        parts = {
            index: [row.new_empty(own[index].numel()) for row in state]
            for index, state in whole.items()
        }
        self.exchange.scatter(whole, parts)
        return [
            self._in_current_order(index, tuple(parts.get(index, state)))
            for index, state in enumerate(states)
        ]

    def _in_current_order(
        self, index: int, state: state_dict.ParamState
    ) -> state_dict.ParamState:
        """Return a state in the order that the parameter's memory has now.

        The job may have changed it since the engine took the parameter, as by another
        memory format.
        """
        shard = local_shard(self.params[index])
        _, _, shape, strides = self._layouts[index]
        is_same = shard.stride() == strides or shard.shape != shape
        if is_same or self.own_rules[index].scales:
            return state
        return tuple(
            flat_like(row.as_strided(shape, strides), self.params[index])
            for row in state
        )

    def load(
        self,
        params: Sequence[torch.Tensor],
        states: Sequence[state_dict.ParamState | None],
    ) -> None:
        """Set the states of all parameters, and recall offloaded gradients.

        A state is None before the first update. If all are None and the engine is not
        open, it stays so.
        """
        if not self.params and not any(states):
            return
        if len(params) > len(self.params) or _layouts(params) != self._layouts:
            if self.params:
                self._stop()
            self._set_params(params, states)
        else:
            self._set_states(self._stop(), states)

    def commit(self, steps: Sequence[int]) -> dict[str, Any]:
        """Return `AdaptiveRunner.commit`, with masters that follow the parameters.

        Recall offloaded gradients. `steps`: the number of updates of each parameter.
        """
        self.calls.finish()
        self._follow_values()
        self._stop()
        return self._runner.commit(
            params=self._describe(self.params), steps=list(steps), rank=own_rank()
        )

    def resume(
        self,
        params: Sequence[torch.Tensor],
        commit: Mapping[str, Any],
        steps: Sequence[int],
    ) -> None:
        """Take the state of a commit, from `commit`. Raises EngineError if the storage
        does not have it, or it is of other parameters or numbers of updates; nothing is
        changed."""
        self.check(params)
        own = {
            "params": self._describe(params),
            "steps": list(steps),
            "rank": own_rank(),
        }
        state_dict.check_commit(commit, own)
        if self.params:
            self._stop()
        self._set_params(params, commit=commit)

    def begin_step(
        self, params: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], dict[int, torch.Tensor], set[int]]:
        """Submit the gradients after the last step has ended and changed parameters are
        followed.

        Returns parameters as the engine has them, flat; gradients that were not
        offloaded, by index; and the indices of all gradients."""
        engine = self.open(params)
        self.calls.finish_updates()
        if engine.update.phase is UpdatePhase.SUBMITTED:
            # An interrupt came before the step before was discarded.
            self.collector.recall()
        if engine.device.is_capturing():
            raise EngineError(
                "step() cannot be captured in a CUDA graph: capture forward and "
                "backward only, and call step() after "
                "each replay"
            )
        self.calls.begin_step()
        self._follow_layouts()
        if not are_same(params, self.params):
            added = set(params).difference(self.params)
            if any(param.grad is not None for param in added):
                self.add(params)
        values, engine = self._follow_values(), self._runner.engine
        gradients = self.collector.collect()
        missing = self.exchange.on_any_rank(gradients) - gradients.keys()
        gradients |= {
            index: torch.zeros_like(flat_view(self.params[index])) for index in missing
        }
        parts = {
            index: [gradient]
            for index, gradient in gradients.items()
            if index in self.exchange.owners
        }
        gradients |= {
            index: gradient
            for index, (gradient,) in self.exchange.gather(parts).items()
        }
        if not engine.is_running:
            self._runner.set_plan()
        engine.submit_gradients(gradients)
        return values, gradients, gradients.keys() | engine.update.offloaded

    def write_parts(
        self, values: Sequence[torch.Tensor], updated: Collection[int]
    ) -> None:
        """Write the parts of exchanged parameters after a step. Raises EngineError if a
        rank has lost its state."""
        is_lost = self._runner.closed
        if (
            self.exchange.on_any_rank(self.exchange.owners if is_lost else ())
            and not is_lost
        ):
            self._runner.close()
            raise EngineError(
                "an update failed midway on another rank, whose state is lost: resume "
                "from a checkpoint"
            )
        written = [index for index in updated if index in self.exchange.owners]
        if written and not is_lost:
            self._write_parts(values, written)
            self.record_values(values, written)

    def end_step(self) -> None:
        """Prepare for the next step after a step that was done, but may still have late
        operations."""
        self._has_stepped = self._has_state = True
        self.collector.end_step()

    def discard_step(self) -> None:
        """Drop the gradients of a step that has submitted them.

        Keep them if the step was done or the state is lost.
        """
        if (
            not self._runner.closed
            and self._runner.engine.update.phase is UpdatePhase.SUBMITTED
        ):
            self.norm.clear()
            self.collector.end_step()
            self._runner.engine.discard()

    def record_values(
        self, values: Sequence[torch.Tensor], indices: Iterable[int] | None = None
    ) -> None:
        """Take the values of parameters as those that masters round to.

        The parameters are given by indices, or all. After a step they are the
        parameters that the step has written, since the job may have changed others.
        Nothing has values of parameters that are their own masters, and no copy of
        which is on the host.
        """
        chosen = range(len(values)) if indices is None else list(indices)
        for index in chosen:
            self._fingerprints.pop(index, None)
        followed = self._followed()
        recorded = [index for index in chosen if index in followed]
        if not recorded:
            return
        own = [
            flat_view(self.params[index])
            if index in self.exchange.owners
            else values[index]
            for index in recorded
        ]
        fingerprints = cache(self._runner.device.fingerprint(own))
        self._fingerprints |= {
            index: (fingerprints, place) for place, index in enumerate(recorded)
        }

    def close(self) -> None:
        """Finish late operations, stop watching backwards, and close the engine."""
        try:
            self.calls.finish()
        finally:
            self.calls.close()
            if self.params:
                self.collector.close()
            self._runner.close()

    def _stop(self) -> Engine:
        """Return the engine, after its plan has stopped.

        States can then be read and written.
        """
        engine = self._runner.engine
        self.collector.recall()
        return engine

    def _describe(self, params: Sequence[torch.Tensor]) -> list[str]:
        """Return what the state of each parameter depends on."""
        pairs = zip(params, self._rules(params), strict=True)
        return [state_dict.describe(rule, param) for param, rule in pairs]

    def _rules(self, params: Sequence[torch.Tensor]) -> list[UpdateRule]:
        rule_of = self._rule_of_params()
        return [rule_of[param] for param in params]

    def _divide(
        self, params: Sequence[torch.Tensor], exchange: Exchange
    ) -> Sequence[Subgroup]:
        shards, options = [local_shard(param) for param in params], self._options
        for index in exchange.owners:
            shards[index] = torch.empty(
                exchange.own.get(index, 0), dtype=shards[index].dtype, device="meta"
            )
        return divide(shards, options.subgroup_params, self._rules(params))

    @torch.inference_mode(False)  # type: ignore[untyped-decorator]
    def _set_params(
        self,
        params: Sequence[torch.Tensor],
        states: Sequence[state_dict.ParamState | None] | None = None,
        commit: Mapping[str, Any] | None = None,
    ) -> None:
        """Divide parameters, with these states or the states of a commit, into
        subgroups on their device, and make a new plan."""
        device = device_of(params)
        if self._options.device is None and device != self._device:
            self._runner.open_device(device)
            self._device = device
        exchange = exchange_of(params, self._rules(params))
        engine = self._runner.rebuild(
            self._divide(params, exchange), len(params), commit=commit
        )
        if self.params:
            self.collector.close()
        self.exchange = exchange
        self.norm = GradientNorm(
            self._runner.device, self.exchange, self._options.max_grad_norm
        )
        self.collector = GradientCollector(
            params,
            self.exchange,
            engine,
            self.norm,
            self._options.gradients,
            self.calls,
            self._expected_scalars,
        )
        self.params, self.own_rules = list(params), self._rules(params)
        self._runner.uses_ranks = any(hasattr(param, "to_local") for param in params)
        self.calls.set_params(self.params, self.exchange.owners)
        self._fingerprints.clear()
        self._layouts = _layouts(params)
        if commit is None:
            self._set_states(engine, states or [None] * len(params))
        else:
            self._has_state = True
            self._loaded.clear()
            self.record_values(self._values())
        self._runner.set_plan()

    def _set_states(
        self, engine: Engine, states: Sequence[state_dict.ParamState | None]
    ) -> None:
        own = self._values()
        parts = {
            index: state
            for index in self.exchange.owners
            if (state := states[index]) is not None
        }
        whole = self.exchange.gather(parts)
        states = [
            tuple(whole[index]) if index in whole else state
            for index, state in enumerate(states)
        ]
        values = self._whole_values(own, True)
        try:
            state_dict.scatter_states(engine.store.states, values, states)
        except BaseException as error:
            self._runner.close()
            raise EngineError(
                f"the state was written in part only ({error}) and is lost: create a "
                "new optimizer, and load it there"
            ) from error
        engine.store.forget_params(range(len(self.params)))
        self._loaded = {
            index: state_dict.rounded_masters(rule, state)
            for index, (rule, state) in enumerate(
                zip(self.own_rules, states, strict=True)
            )
            if state is not None
        }
        self._has_state = self._has_state or bool(self._loaded)
        self.record_values(own)

    def _values(self) -> list[torch.Tensor]:
        return [flat_view(param) for param in self.params]

    def _whole_values(
        self, values: Sequence[torch.Tensor], are_read: bool
    ) -> list[torch.Tensor]:
        """Return parameters as the engine has them.

        Exchanged parameters are whole ones or memory for them.
        """
        parts = {index: [values[index]] for index in self.exchange.owners}
        whole = self.exchange.gather(parts, are_read)
        return [
            whole[index][0] if index in whole else value
            for index, value in enumerate(values)
        ]

    def _write_parts(
        self, values: Sequence[torch.Tensor], indices: Iterable[int]
    ) -> None:
        parts = {index: [flat_view(self.params[index])] for index in indices}
        self.exchange.scatter({index: [values[index]] for index in parts}, parts)

    def _follow_layouts(self) -> None:
        """Open the engine again if parameters have moved, or changed their dtype,
        before the first step."""
        layouts = _layouts(self.params)
        if layouts == self._layouts:
            return
        order_changed = [layout[2:] for layout in layouts] != [
            layout[2:] for layout in self._layouts
        ]
        if self._has_stepped or (self._has_state and order_changed):
            pairs = zip(self._layouts, layouts, strict=True)
            old, new = next((old, new) for old, new in pairs if old != new)
            raise EngineError(
                f"a parameter was {_layout_text(old)} when the optimizer took it, and "
                f"is {_layout_text(new)} now: "
                "change it back, or create a new optimizer and load the state_dict() "
                "of this one"
            )
        self.check(self.params)
        states = None
        if self._has_state:
            rules = zip(
                self.gather(),
                self.own_rules,
                self._rules(self.params),
                self._values(),
                strict=True,
            )
            states = [state_dict.convert_state(*each) for each in rules]
        self._stop()
        self._set_params(self.params, states)

    def _follow_values(self) -> list[torch.Tensor]:
        """Update masters of parameters that the job has changed since the last step.

        Return all parameters for the engine.
        """
        values = self._values()
        addresses = [value.data_ptr() for value in values]
        if addresses != self._addresses:
            check_apart(values)
            self._addresses = addresses
        changed = self._changed(values) | self._loaded.keys()
        exchanged = self.exchange.on_any_rank(changed)
        changed |= exchanged
        values = self._whole_values(values, bool(exchanged))
        if changed:
            engine = self._runner.engine
            with engine.paused():
                replaced = state_dict.update_masters(
                    engine.store.states, values, changed, self._loaded
                )
            engine.store.forget_params(changed)
            # Now, since the job may change those that the step does not update before
            # its end.
            self.record_values(values, changed)
            if outdated := len(replaced & self._loaded.keys()):
                log.warning(
                    "ebbtide: %d parameters have changed since the masters in the "
                    "state dict, as by another optimizer: "
                    "masters that do not round to them start from the parameters",
                    outdated,
                )
            self._loaded.clear()
        return values

    def _followed(self) -> set[int]:
        """Return the parameters whose value something else has, too."""
        rules = enumerate(self.own_rules)
        with_masters = {index for index, rule in rules if rule.has_masters}
        return with_masters | self._runner.engine.store.params_on_host()

    def _changed(self, values: Sequence[torch.Tensor]) -> set[int]:
        """Return the indices of the parameters whose values changed.

        Their values are not what the masters round to, or that is not known.
        """
        followed = self._followed()
        recorded = sorted(followed & self._fingerprints.keys())
        own = [values[index] for index in recorded]
        if not own:
            return followed
        if _layouts(self.params) == self._layouts:
            current = self._runner.device.fingerprint(own)()
        else:
            # Parameters that have moved are not on the device of the engine.
            current = [self._runner.kernel.fingerprint(value.cpu()) for value in own]
        unchanged = set()
        for index, fingerprint in zip(recorded, current, strict=True):
            fingerprints, place = self._fingerprints[index]
            if fingerprints()[place] == fingerprint:
                unchanged.add(index)
        return followed - unchanged


def _layouts(params: Sequence[torch.Tensor]) -> list[_Layout]:
    shards = [local_shard(param) for param in params]
    return [
        (shard.device, shard.dtype, shard.shape, shard.stride()) for shard in shards
    ]


def _layout_text(layout: _Layout) -> str:
    device, dtype, shape, strides = layout
    return f"{dtype} of shape {tuple(shape)} and strides {strides} on {device}"
