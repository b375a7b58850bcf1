"""Optimizers with an fp32 master and state where a policy puts it, with the same bits
under every policy."""

import inspect
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.options import (
    OptimizerArguments,
    OptimizerOptions,
    shows_options,
)
from ebbtide.interleave.engine.param_updater import ParamUpdater
from ebbtide.interleave.engine.params.local_shards import own_rank
from ebbtide.interleave.engine.params.state_dict import (
    RECORD,
    make_record,
    read_state_dict,
)
from ebbtide.interleave.engine.params.step_calls import locked
from ebbtide.interleave.engine.rules.rule import GroupRules
from ebbtide.interleave.engine.runtime.executor import deferred_interrupts


class InterleavedOptimizer(ParamUpdater, torch.optim.Optimizer):  # type: ignore[misc]
    """An optimizer with an fp32 master, for state that does not fit on the device, and
    the optimizer state of its parameters.

    Parameters have the same bits under every policy (`reference` defines them).

    Args:
        params: Parameters or parameter groups, as for optimizers of torch.
        rule: `adamw`, `adam`, `sgd`, `lion`, `muon`, `adamw-bf16`, `adamw-8bit`,
            `adamw-remainder`, or `adamw-pure-bf16` and likewise of `adam` and `sgd`. A
            group with a key `rule` has that rule, with its defaults.
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
        rules = GroupRules(rule, hyperparameters)
        options = OptimizerOptions.of_arguments(
            **{name: keywords[name] for name in names}
        )
        # By state dicts in the making, the inner one last.
        self._additions: list[Callable[[dict[str, Any]], None]] = []
        ParamUpdater.__init__(self, rules, options)
        try:
            torch.optim.Optimizer.__init__(self, params, rules.defaults)
            self._calls.add_hooks(keywords.get("model"))
            self._offloaded.plan_or_open(self._params_with_state())
        except BaseException:
            self._calls.close()
            self._runner.close()
            raise

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
        self.update_params()
        return loss

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
        index = {param: number for number, param in enumerate(self._group_params())}

        def add_states(state_dict: dict[str, Any]) -> None:
            entries = self.entries().items()
            state_dict["state"].update({index[param]: own for param, own in entries})

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

    def _step_count(self, param: torch.Tensor) -> int:
        # `state` makes an entry for every key that it is asked for.
        return int(self.state.get(param, {}).get("step", 0))

    def _count_step(self, params: Collection[torch.Tensor]) -> None:
        # In `state`, since tools of torch look there for existing state.
        self.state.update(
            {param: {"step": self._step_count(param) + 1} for param in params}
        )

    def _base_state_dict(self, add: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        """Return the state dict of the base class with what a function adds before any
        other hook sees it."""

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
