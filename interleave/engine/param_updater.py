"""Updates the parameters of groups with an engine."""

import logging
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch

from ebbtide.interleave.engine.adaptive.runner import AdaptiveRunner
from ebbtide.interleave.engine.devices.device import Device
from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.numerics.reference import LossScale, scalars_of
from ebbtide.interleave.engine.options import Budget, OptimizerOptions
from ebbtide.interleave.engine.params.local_shards import are_same
from ebbtide.interleave.engine.params.offloaded_params import OffloadedParams
from ebbtide.interleave.engine.params.state_dict import make_entry, parse_entry
from ebbtide.interleave.engine.params.step_calls import locked, weak_call
from ebbtide.interleave.engine.rules.rule import GroupRules, Scalars, UpdateRule
from ebbtide.interleave.engine.runtime.executor import deferred_interrupts
from ebbtide.interleave.model.plan import Plan
from ebbtide.interleave.model.schedule import Schedule
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies import Policy
from ebbtide.machines.machine import Machine

log = logging.getLogger("ebbtide")


class ParamUpdater:
    """Updates the parameters of groups with state where a policy puts it.

    It has nothing of torch's optimizers but their groups: `InterleavedOptimizer` adds
    their methods, and `ebbtide run` calls it from theirs.

    Attributes:
        param_groups: Groups of parameters and hyperparameters, as in torch.
        steps: The number of updates of each parameter.
        follow_groups: Sets `param_groups`, where the caller has others, before factors
            are expected of them.
    """

    def __init__(self, rules: GroupRules, options: OptimizerOptions) -> None:
        self.param_groups: list[dict[str, Any]] = []
        self.steps: dict[torch.Tensor, int] = {}
        self.follow_groups: Callable[[], None] = lambda: None
        # The factor of gradients that the caller gave to the last step.
        self._last_factor: float | None = None
        self._rules = rules
        self._loss_scale = LossScale(options.loss_scale)
        self._runner = AdaptiveRunner(options)
        callbacks = weak_call(self._expected_scalars), weak_call(self._rule_of_params)
        self._offloaded = OffloadedParams(self._runner, *callbacks)
        self._calls = self._offloaded.calls
        self._calls.finish_after(self)

    @property
    def params(self) -> list[torch.Tensor]:
        """The parameters that have state; none before the engine is open."""
        return self._offloaded.params

    @property
    def moments(self) -> dict[torch.Tensor, tuple[str, ...]]:
        """The names of the moments of each parameter."""
        return {param: own.moments for param, own in self._rule_of_params().items()}

    @property
    def is_lost(self) -> bool:
        """Whether an update has failed midway, so that the state is lost."""
        return bool(self.params) and self._runner.closed

    @property
    def device(self) -> Device:
        """The device of the engine, which is open."""
        return self._runner.device

    @property
    def workload(self) -> Workload:
        """The job as plans are made for it, with the phases that steps have shown."""
        self._open()
        return self._runner.planner.workload

    @property
    def last_schedule(self) -> Schedule | None:
        """The measured schedule of the last step; None before the first."""
        return None if self._runner.closed else self._runner.engine.last_schedule

    @property
    def plan(self) -> Plan:
        """The plan of the next step. Parameters on the CPU are taken there, if there
        was no step yet."""
        self._open()
        return self._runner.plan

    @property
    def machine(self) -> Machine:
        """The rates for planning, corrected by the steps so far. Parameters are taken
        as by `plan`."""
        self._open()
        return self._runner.planner.machine

    @property
    def storage_written_bytes(self) -> int:
        """Bytes of state written to `storage` so far, by steps and commits.

        Drives are rated for a number of them (TBW).
        """
        return self._runner.backing.written_bytes

    @property
    def ebbtide_state(self) -> list[tuple[str, torch.Tensor]]:
        """The state by name, for recordings; none before the first step."""
        return (
            [] if self._runner.closed else self._runner.engine.store.states.named_rows()
        )

    @locked
    def update_params(self, factor: float | None = None) -> None:
        """Update all parameters that have a gradient.

        Update none if this raises before the engine has begun to.

        Args:
            factor: The factor of all gradients, which may be of any value. By default
                it is of their norm and the loss scale, and a gradient that is not
                finite raises EngineError; nothing is changed then.
        """
        offloaded = self._offloaded
        params = self._params_with_state()
        self._check_groups()
        # Not deferred: the engine may take long to open, and other ranks may never
        # come.
        offloaded.open(params)
        offloaded.exchange.on_any_rank(())
        try:
            with deferred_interrupts():
                values, gradients, updated = offloaded.begin_step(params)
            stale_share = self._runner.engine.update.stale_share
            self._runner.planner.observe_copies(stale_share)
            scale = self._own_factor(gradients) if factor is None else factor
            self._runner.planner.observe_clipping(
                bool(stale_share) or scale != self._expected_scale
            )
            self._last_factor = factor
            with deferred_interrupts():
                if scale is None:
                    self._skip_step()
                    return
                record = partial(offloaded.record_values, values)
                scalars = self._scalars(updated, scale)
                try:
                    self._calls.step(
                        values, scalars, partial(self._end_step, updated), record
                    )
                finally:
                    offloaded.write_parts(values, updated)
        except BaseException:
            with deferred_interrupts():
                offloaded.discard_step()
            raise

    def _own_factor(self, gradients: Mapping[int, torch.Tensor]) -> float | None:
        """Return the factor that clips and scales gradients; None if one is not
        finite."""
        norm = self._offloaded.norm
        # Not deferred: other ranks may never come. The gradients are copied to the host
        # meanwhile.
        norm.add_all(gradients)
        return norm.scale_factor(self._offloaded.params, self._loss_scale.value)

    @locked
    def entries(self) -> dict[torch.Tensor, dict[str, Any]]:
        """Return the state of each parameter that was updated, as state dicts have it.

        All is in new host memory.
        """
        offloaded = self._offloaded
        # The job may have changed the types of parameters, and so what groups name.
        parts = zip(
            offloaded.params, offloaded.own_rules, offloaded.gather(), strict=True
        )
        return {
            param: make_entry(rule, param, state, self._step_count(param))
            for param, rule, state in parts
            if self._step_count(param)
        }

    @locked
    def load_entries(self, entries: Mapping[torch.Tensor, Mapping[str, Any]]) -> None:
        """Set the state of all parameters from their entries in state dicts; parameters
        without an entry begin anew.

        Raises EngineError for an entry of another rule or shape; nothing is changed."""
        params, rule_of = self._params_with_state(entries), self._rule_of_params()
        loaded = {
            param: parse_entry(rule_of[param], param, entries[param], "a state", False)
            for param in params
            if param in entries
        }
        states = [loaded[param][0] if param in loaded else None for param in params]
        with deferred_interrupts():
            self._offloaded.load(params, states)
            self.steps = {param: step for param, (_, step) in loaded.items()}

    def wait_in(self, model: torch.nn.Module) -> None:
        """Let updates end under the forward of a module, which waits for them.

        Call it before the first step. Raises EngineError for a module that cannot."""
        self._calls.add_hooks(model)

    @locked
    def use_policy(self, policy: Policy, budget: Budget | None) -> None:
        """Go on under another policy, with a budget of device memory for state.

        Raises EngineError or PolicyError if it has no plan; the plan before stays."""
        self.synchronize()
        with deferred_interrupts():
            self._runner.use_policy(policy, budget)

    @locked
    def close(self) -> None:
        """Finish the last step, end the threads and release all memory.

        The optimizer cannot step any more. Deleting it does the same.
        """
        self._offloaded.close()

    def synchronize(self) -> None:
        """Wait until the last step has written all parameters. Only with `overlap` it
        may not have when it returned.

        Raises EngineError as `step`, or if the job wrote to a parameter before."""
        self._calls.finish()

    @locked
    def _open(self) -> None:
        if not self._offloaded.params:
            self._offloaded.open(self._params_with_state())

    def _skip_step(self) -> None:
        """Drop the gradients, since one is not finite.

        Raises EngineError if there is no loss scale.
        """
        self._loss_scale.update(False)
        self._offloaded.discard_step()
        if not self._loss_scale.skips_steps:
            raise EngineError(
                "a gradient is infinite or not a number: this step was skipped, "
                "nothing was changed"
            )
        log.info(
            "ebbtide: a gradient is not finite: step skipped, loss scale now %g",
            self._loss_scale.value,
        )

    def _end_step(self, updated: Collection[int]) -> None:
        """Count a step for the parameters of these indices."""
        self._loss_scale.update(True)
        self._count_step([self._offloaded.params[index] for index in updated])
        self._offloaded.end_step()

    def _group_params(self) -> list[torch.Tensor]:
        """Return the parameters of all groups. Raises EngineError if one that has state
        is in no group any more."""
        params = [param for group in self.param_groups for param in group["params"]]
        if are_same(params, self._offloaded.params):
            return params
        if removed := len(set(self._offloaded.params).difference(params)):
            raise EngineError(
                f"{removed} parameters of this optimizer are in no group any more: put "
                "their group back, or create a "
                "new optimizer for the others"
            )
        return params

    def _params_with_state(
        self, others: Collection[torch.Tensor] = ()
    ) -> list[torch.Tensor]:
        """Return the parameters that need state, each once.

        They are not frozen now, or were not before: then they have state, also in
        `others`, or a gradient."""
        params = self._group_params()
        if are_same(params, self._offloaded.params):
            return params
        own = {*self._offloaded.params, *others}
        return [
            param
            for param in dict.fromkeys(params)
            if param.requires_grad or param in own or param.grad is not None
        ]

    def _rule_of_params(self) -> dict[torch.Tensor, UpdateRule]:
        return self._rules.by_param(self.param_groups)

    def _check_groups(self) -> None:
        """Raise EngineError if the job has set an unsupported hyperparameter or rule.

        A rule other than the optimizer's is not supported.
        """
        list(map(self._rules.checked, self.param_groups))
        self._offloaded.check_rules()

    def _step_count(self, param: torch.Tensor) -> int:
        return self.steps.get(param, 0)

    def _count_step(self, params: Collection[torch.Tensor]) -> None:
        self.steps.update({param: self._step_count(param) + 1 for param in params})

    def _scalars(self, updated: Collection[int], scale: float) -> list[Scalars | None]:
        """Return the factors of the next update of each parameter.

        Return None for those that are not updated.
        """
        return scalars_of(
            self._rules,
            self._offloaded.params,
            self.param_groups,
            self._step_count,
            updated,
            scale,
        )

    @property
    def _expected_scale(self) -> float:
        """The factor of gradients if they are finite and not clipped."""
        if self._last_factor is not None:
            return self._last_factor
        return 1.0 / self._loss_scale.value

    def _expected_scalars(self) -> list[Scalars | None]:
        """Return the factors of the next step by parameter if it updates all and is
        neither clipped nor skipped."""
        count = len(self._offloaded.params)
        try:
            self.follow_groups()
            self._group_params()
            self._check_groups()
        except EngineError:  # The step raises it.
            return [None] * count
        return self._scalars(range(count), self._expected_scale)
