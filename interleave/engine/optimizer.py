"""Optimizers with an fp32 master and state where a policy puts it.

They have the same bits under every policy.
"""

import inspect
import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from ebbtide.interleave.engine.adaptive.runner import AdaptiveRunner
from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.numerics.reference import LossScale, scalars_of
from ebbtide.interleave.engine.options import (
    OptimizerArguments,
    OptimizerOptions,
    shows_options,
)
from ebbtide.interleave.engine.params.local_shards import own_rank
from ebbtide.interleave.engine.params.offloaded_params import OffloadedParams
from ebbtide.interleave.engine.params.state_dict import (
    RECORD,
    make_entry,
    make_record,
    read_state_dict,
)
from ebbtide.interleave.engine.params.step_calls import locked, weak_call
from ebbtide.interleave.engine.rules.rule import GroupRules, Scalars, UpdateRule
from ebbtide.interleave.engine.runtime.executor import deferred_interrupts
from ebbtide.interleave.model.plan import Plan
from ebbtide.interleave.model.schedule import Schedule
from ebbtide.machines.machine import Machine

log = logging.getLogger("ebbtide")


class InterleavedOptimizer(torch.optim.Optimizer):  # type: ignore[misc]
    """An optimizer with an fp32 master, for state that does not fit on the device.

    This is the optimizer state of its parameters.

    Parameters have the same bits under every policy (`reference` defines them).

    Args:
        params: Parameters or parameter groups, as for optimizers of torch.
        rule: `adamw`, `adam`, `sgd`, `lion`, `muon`, `adamw-bf16`, `adamw-pure-bf16`,
            `adamw-8bit` or `adamw-remainder`. A group with a key `rule` has that rule,
            with its defaults.
        keywords: Options, which OptimizerOptions lists, and hyperparameters of the
            rule, as in torch or in the paper.

    Raises:
        EngineError: If there is no such rule, or a parameter or an option is not
            supported.
        PolicyError: If the policy is not valid.
        MachineError: If the machine lacks a rate that the policy needs.
    """

    @shows_options(OptimizerArguments, others="hyperparameters")
    def __init__(self, params: Any, rule: str = "adamw", **keywords: Any) -> None:
        names = inspect.get_annotations(OptimizerArguments).keys() & keywords.keys()
        hyperparameters = {
            name: value for name, value in keywords.items() if name not in names
        }
        if "master" in hyperparameters:
            raise EngineError(
                "there is no option master: for masters of 16 further bits use the "
                "rule adamw-remainder, "
                "InterleavedOptimizer(params, 'adamw-remainder')"
            )
        self._rules = GroupRules(rule, hyperparameters)
        options = OptimizerOptions.of_arguments(
            **{name: keywords[name] for name in names}
        )
        self._loss_scale = LossScale(options.loss_scale)
        # By state dicts in the making, the inner one last.
        self._additions: list[Callable[[dict[str, Any]], None]] = []
        self._runner = AdaptiveRunner(options)
        callbacks = weak_call(self._expected_scalars), weak_call(self._rule_of_params)
        self._offloaded = OffloadedParams(self._runner, *callbacks)
        self._calls = self._offloaded.calls
        self._calls.finish_after(self)
        try:
            super().__init__(params, self._rules.defaults)
            self._calls.add_hooks(keywords.get("model"))
            self._offloaded.plan_or_open(self._params_with_state())
        except BaseException:
            self._calls.close()
            self._runner.close()
            raise

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

    @property
    def loss_scale(self) -> float:
        """The current factor for losses."""
        return self._loss_scale.value

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss to back-propagate: the loss times the loss scale."""
        return loss * self._loss_scale.value

    @torch._disable_dynamo  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update all parameters that have a gradient.

        Args:
            closure: Computes the loss and the gradients, and returns the loss.

        Returns:
            The result of the closure; None without one.

        Raises:
            EngineError: For a gradient that is not finite; nothing is changed then.
                Also if an operation failed: the step is completed on the CPU, unless
                the message says that the state is lost.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Without the closure: its backward may call hooks on other threads.
        self._update()
        return loss

    @locked
    def _update(self) -> None:
        """Update all parameters that have a gradient.

        Update none if this raises before the engine has begun to.
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
            # Not deferred: other ranks may never come. The gradients are copied to the
            # host meanwhile.
            offloaded.norm.add_all(gradients)
            scale = offloaded.norm.scale_factor(
                offloaded.params, self._loss_scale.value
            )
            with deferred_interrupts():
                self._runner.planner.observe_clipping(scale != self._expected_scale)
                if scale is None:
                    self._skip_step()
                else:
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

    @locked
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Also update the parameters of a group from now on.

        Raises EngineError if the parameters or hyperparameters are not supported;
        nothing is changed."""
        param_group = self._rules.checked(param_group)
        super().add_param_group(param_group)
        self._rules.drop_other_defaults(param_group)
        if not self._offloaded.is_checked:
            # The constructor checks all groups together.
            return
        try:
            self._offloaded.add(self._params_with_state())
        except BaseException:
            self.param_groups.pop()
            raise

    @locked
    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of torch's optimizer, with the fp32 master.

        The master is in addition to the moments; all is on the host.

        It is the one after the last step, also in the middle of a backward and from
        another thread: it waits for a step that runs, and steps wait for it."""
        rule_of, index = (
            self._rule_of_params(),
            {param: number for number, param in enumerate(self._group_params())},
        )

        def add_states(state_dict: dict[str, Any]) -> None:
            for param, state in zip(
                self._offloaded.params, self._offloaded.gather(), strict=True
            ):
                if self._step_count(param):
                    entry = make_entry(
                        rule_of[param], param, state, self._step_count(param)
                    )
                    state_dict["state"][index[param]] = entry

        return self._base_state_dict(add_states)

    @locked
    def commit(self) -> dict[str, Any]:
        """Make the state in `storage` the one to resume from.

        Return a small dict for `load_state_dict`.

        Save the dict together with the parameters. It can be loaded with the same
        storage and subgroups, in this process or after a crash, until the first step
        after the next commit. Raises EngineError if there is no storage, or too little
        space in it; the commit before stays."""
        self._open()
        params = self._offloaded.params
        storage = self._offloaded.commit([self._step_count(param) for param in params])
        return self._base_state_dict(lambda commit: commit.update(storage=storage))

    @locked
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what an optimizer saved, or what `commit` has returned.

        The optimizer is this one (under any policy) or torch's.

        A master is used where it rounds to the parameter at the next step; others, and
        missing ones, start from there.

        Raises:
            EngineError: If it is not a state dict of this model; nothing is changed."""
        offloaded = self._offloaded
        state_dict = state_dict.copy()
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        self._group_params()
        own_params = set(offloaded.params or self._params_with_state())
        saved = read_state_dict(
            self._rules, state_dict, self.param_groups, own_params, offloaded.check
        )
        if "loss_scale" in state_dict:
            self._loss_scale.check(state_dict["loss_scale"])
        with deferred_interrupts():
            if saved.states is None:
                offloaded.resume(saved.params, state_dict["storage"], saved.steps)
            else:
                offloaded.load(saved.params, saved.states)
            if "loss_scale" in state_dict:
                self._loss_scale.load_state_dict(state_dict["loss_scale"])
            for group, own_group in zip(
                state_dict["param_groups"], self.param_groups, strict=True
            ):
                own_group.update(
                    {key: value for key, value in group.items() if key != "params"}
                )
            self.state.clear()
            steps = zip(saved.params, saved.steps, strict=True)
            self.state.update({param: {"step": step} for param, step in steps if step})
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

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

    @contextmanager
    def hold_steps(self) -> Iterator[None]:
        """Let no other thread step meanwhile, after the last step has ended.

        A thread that saves checkpoints reads `model.state_dict()`, whose tensors are
        the parameters themselves, and `state_dict()` inside it, to have both after the
        same step. Raises EngineError as `synchronize`."""
        with self._calls.lock:
            self.synchronize()
            yield

    def __getstate__(self) -> dict[str, Any]:
        """Raise EngineError, for copies and pickles: they would not have the state."""
        raise EngineError(
            f"an {type(self).__name__} cannot be copied or pickled, since its state is "
            "with its engine: create another "
            "one and load the state_dict() of this one"
        )

    @locked
    def _open(self) -> None:
        self._offloaded.open(self._params_with_state())

    def _base_state_dict(self, add: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        """Return the state dict of the base class with what a function adds.

        It is added before any other hook sees the state dict.
        """

        def complete(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
            # A signal handler within the call may make another state dict, to which
            # this adds nothing.
            if self._additions[-1] is not add:
                return
            add(state_dict)
            if self._loss_scale.skips_steps:
                state_dict["loss_scale"] = self._loss_scale.state_dict()
            state_dict[RECORD] = make_record(state_dict, own_rank())

        handle = self.register_state_dict_post_hook(complete, prepend=True)
        self._additions.append(add)
        try:
            state_dict: dict[str, Any] = super().state_dict()
        finally:
            self._additions.pop()
            handle.remove()
        return state_dict

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
        params = [self._offloaded.params[index] for index in updated]
        # In `state`, since tools of torch look there for existing state.
        self.state.update(
            {param: {"step": self._step_count(param) + 1} for param in params}
        )
        self._offloaded.end_step()

    def _group_params(self) -> list[torch.Tensor]:
        """Return the parameters of all groups. Raises EngineError if one that has state
        is in no group any more."""
        params = [param for group in self.param_groups for param in group["params"]]
        if removed := len(set(self._offloaded.params).difference(params)):
            raise EngineError(
                f"{removed} parameters of this optimizer are in no group any more: put "
                "their group back, or create a "
                "new optimizer for the others"
            )
        return params

    def _params_with_state(self) -> list[torch.Tensor]:
        """Return the parameters that need state, each once.

        They are not frozen, or were not frozen before.
        """
        own = set(self._offloaded.params)
        return [
            param
            for param in dict.fromkeys(self._group_params())
            if param.requires_grad or param in own
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
        # `state` makes an entry for every key that it is asked for.
        return int(self.state.get(param, {}).get("step", 0))

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
        return 1.0 / self._loss_scale.value

    def _expected_scalars(self) -> list[Scalars | None]:
        """Return the factors of the next step by parameter.

        They are returned if it updates all and is neither clipped nor skipped.
        """
        count = len(self._offloaded.params)
        try:
            self._check_groups()
        except EngineError:  # The step raises it.
            return [None] * count
        return self._scalars(range(count), self._expected_scale)
