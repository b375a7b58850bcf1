"""Drives one optimizer of torch by an engine."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch

from ebbtide import host_limits
from ebbtide.errors import UserError
from ebbtide.features.run.driver.agreement import all_ranks_agree
from ebbtide.features.run.driver.figures import RunFigures
from ebbtide.features.run.driver.groups import (
    engine_groups,
    follow_groups,
    params_of,
    reason_to_leave,
    unsupported_option,
)
from ebbtide.features.run.driver.log import dense_parts
from ebbtide.features.run.driver.process import DrivenProcess, Step
from ebbtide.features.run.driver.torch_state import (
    State,
    contents,
    move_to_params,
    torch_layout,
)
from ebbtide.features.run.driver.windows import (
    budget_by_phase,
    choose_policy,
    free_bytes,
    policy_of,
    state_bytes,
)
from ebbtide.features.run.options import WINDOW_STEPS
from ebbtide.interleave.engine.devices.emulated import EmulatedDevice
from ebbtide.interleave.engine.options import Budget, OptimizerOptions
from ebbtide.interleave.engine.param_updater import ParamUpdater
from ebbtide.interleave.engine.params.local_shards import (
    are_same,
    device_of,
    local_shard,
)
from ebbtide.interleave.engine.rules.rule import GroupRules
from ebbtide.state_bytes import STATE_BYTES
from ebbtide.units import bytes_text

_FIRST_POLICY = "zero-offload"
_SUBGROUPS = 10
_MAX_SUBGROUP_PARAMS = 100_000_000
# Changes of free memory by a smaller share make no new plan.
_DRIFT = 0.15
_FITS = "its whole state fits beside the job: torch's own step goes on"


class OptimizerDriver:
    """Updates the parameters of an optimizer by torch or by an engine.

    The state is in the optimizer's `__dict__`, in torch's layout, or in the engine; in
    both while nobody has changed the former.

    Attributes:
        updater: The engine's updates; None while torch updates.
        left: Why torch updates for good; None while an engine does or may.
        steps: The number of updates by engines.
        iterations: The number of steps that followed a backward.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, process: DrivenProcess, number: int
    ) -> None:
        self.updater: ParamUpdater | None = None
        self.left: str | None = None
        self.steps = self.iterations = 0
        self.number = number
        self.policy = _FIRST_POLICY
        self.figures = RunFigures()
        self._optimizer = weakref.ref(optimizer)
        self._process = process
        self._seen_backwards = 0
        # What the plan may use, and what was free in all phases when it was made.
        self._budget: Budget | None = None
        self._free = 0.0
        # The state that a reader has got, and its contents then.
        self._exported: tuple[State, Any] | None = None
        self._plan: object = None

    def step(self, optimizer: torch.optim.Optimizer, torch_step: Step) -> None:
        """Update the parameters, as a step of the optimizer does."""
        process = self._process
        follows_backward = process.backwards > self._seen_backwards
        self._seen_backwards = process.backwards
        self.iterations += follows_backward
        is_driven = process.options.policy != "none" and self.left is None
        # Tools call `step` without gradients to make a state.
        if not is_driven or (self.updater is None and not follows_backward):
            torch_step(optimizer)
        else:
            self._update(optimizer, torch_step)

    def export(self) -> State | None:
        """Return a copy of the engine's state for a reader; None without an engine."""
        optimizer = self._optimizer()
        if self.updater is None or optimizer is None:
            return None
        state = torch_layout(self.updater.entries(), optimizer.param_groups)
        optimizer.__dict__["state"] = state
        self._exported = state, contents(state)
        return state

    def figures_of_torch(self) -> dict[str, int]:
        """Return the bytes of the state that torch has beside the parameters."""
        optimizer = self._optimizer()
        state = {} if optimizer is None else optimizer.__dict__.get("state", {})
        values = [value for entry in state.values() for value in entry.values()]
        tensors = [local_shard(one) for one in values if isinstance(one, torch.Tensor)]
        parts = [part for tensor in tensors for part in dense_parts(tensor)]
        return {"device_bytes": sum(part.nbytes for part in parts)}

    def close(self) -> None:
        """Close the engine, and keep the figures of its plan."""
        updater = self.updater
        self.release()
        if updater is not None:
            updater.close()

    def release(self) -> None:
        """Leave the engine to its own end, and keep the figures of its plan.

        A garbage collection can do so while other engines are in use.
        """
        self.figures.end()
        self.updater = None

    def _update(
        self,
        optimizer: torch.optim.Optimizer,
        torch_step: Step,
        is_again: bool = False,
    ) -> None:
        # A scaler leaves unscaling, and skipping the step, to a fused kernel.
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None and float(found_inf):
            return
        self._follow(optimizer)
        reason = self.updater and unsupported_option(optimizer)
        if reason:
            self._leave(optimizer, reason)
            torch_step(optimizer)
            return
        updater = self.updater or self._attach(optimizer)
        if updater is None:
            torch_step(optimizer)
            return
        grad_scale = getattr(optimizer, "grad_scale", None)
        factor = 1.0 if grad_scale is None else 1.0 / float(grad_scale)
        counts = dict(updater.steps)
        try:
            updater.param_groups = engine_groups(optimizer)
            updater.update_params(factor)
        except UserError as error:
            if updater.is_lost:
                raise
            is_done = updater.steps != counts
            if not is_done and not is_again:
                self._fall_back(str(error))
                self._update(optimizer, torch_step, is_again=True)
                return
            self._leave(optimizer, str(error))
            if not is_done:
                torch_step(optimizer)
            return
        _count_no_idle_steps(updater, counts)
        if factor != 1:
            _unscale_grads(optimizer, factor)
        self._end_update(optimizer, updater)

    def _end_update(
        self, optimizer: torch.optim.Optimizer, updater: ParamUpdater
    ) -> None:
        """Count an update by the engine, and change the plan where that is due."""
        self.steps += 1
        self.figures.add(updater)
        self._note_plan(updater)
        if self.steps == WINDOW_STEPS:
            self._decide(optimizer, updater)
        elif self._budget is not None:
            self._follow_memory(updater)

    def _follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Take what the job did to state and groups since the last step.

        The engine is closed, and another one opened, if it must.
        """
        state, exported = optimizer.__dict__.get("state"), self._exported
        self._exported = None
        if self.updater is None:
            return
        is_unchanged = state is None or (
            exported is not None
            and state is exported[0]
            and contents(state) == exported[1]
        )
        params, own = params_of(optimizer), self.updater.params
        are_in_groups = are_same(params, own) or set(params).issuperset(own)
        if is_unchanged and are_in_groups:
            optimizer.__dict__.pop("state", None)
            return
        if state is None:
            self.export()
        self.close()

    def _attach(self, optimizer: torch.optim.Optimizer) -> ParamUpdater | None:
        """Open an engine with the state of the optimizer; None if torch is to go on."""
        updater = None
        reason = reason_to_leave(optimizer)
        if reason is None:
            try:
                updater = self._open(optimizer)
            except UserError as error:
                reason = str(error)
                if self.policy != _FIRST_POLICY:
                    self._fall_back(reason)
                    return self._attach(optimizer)
        if not self.steps and not all_ranks_agree(updater is not None):
            reason = reason or "torch updates on another rank"
        if reason is not None:
            if updater is not None:
                updater.close()
            self._set_left(optimizer, reason)
            return None
        self.updater = updater
        optimizer.__dict__.pop("state", None)
        return updater

    def _open(self, optimizer: torch.optim.Optimizer) -> ParamUpdater:
        process, params = self._process, params_of(optimizer)
        size = sum(local_shard(param).numel() for param in params)
        device = device_of([param for param in params if param.requires_grad])
        model = process.models and process.models.with_params(params)
        # One core is left to an emulated device.
        threads = max(1, host_limits.cores() - 1) if device.type == "cpu" else None
        options = OptimizerOptions.of_arguments(
            policy=policy_of(self.policy, STATE_BYTES * size),
            machine=process.options.machine,
            memory_budget=self._budget,
            gradients="copied",
            subgroup_params=min(_MAX_SUBGROUP_PARAMS, max(1, -(-size // _SUBGROUPS))),
            device=process.device_for(device),
            threads=threads,
            model=model,
        )
        updater = ParamUpdater(GroupRules("adamw", {}), options)
        try:
            if model is not None:
                updater.wait_in(model)
            follow_groups(updater, self._optimizer)
            updater.follow_groups = partial(follow_groups, updater, self._optimizer)
            updater.load_entries(_whole_entries(optimizer, updater))
            self._plan = updater.plan
        except BaseException:
            updater.close()
            raise
        return updater

    def _decide(self, optimizer: torch.optim.Optimizer, updater: ParamUpdater) -> None:
        """Take the policy of the run, by the windows of the first iterations."""
        process = self._process
        is_free = free_bytes(process, updater) >= state_bytes(updater)
        # Replicas that torch updates on some ranks alone would drift apart.
        if not process.options.compares and all_ranks_agree(is_free):
            self._leave(optimizer, _FITS)
            return
        try:
            self._use_policy(process.options.policy, updater)
        except Exception as error:
            # Also a fault of a policy of the user's: the plan before stays.
            self._say(f"policy {process.options.policy}: {error}; zero-offload goes on")
            process.log.add("failed", optimizer=self.number, reason=str(error))

    def _use_policy(self, name: str, updater: ParamUpdater) -> None:
        """Go on under a policy, with the device memory that is free now."""
        budget = budget_by_phase(self._process, updater)
        is_emulated = isinstance(updater.device, EmulatedDevice)
        self.policy = choose_policy(name, updater, budget)
        self._budget, self._free = budget, free_bytes(self._process, updater)
        where = "emulated device memory" if is_emulated else "device memory"
        self._say(f"policy {self.policy} with {_text(budget)} of {where}")
        self._note_plan(updater)

    def _follow_memory(self, updater: ParamUpdater) -> None:
        """Make a smaller plan once the job leaves less memory free, or a wider one."""
        free = free_bytes(self._process, updater)
        if abs(free - self._free) <= _DRIFT * max(free, self._free):
            return
        try:
            self._use_policy(self.policy, updater)
        except UserError as error:
            self._fall_back(str(error))

    def _fall_back(self, reason: str) -> None:
        """Begin again under the policy that needs the least device memory.

        The job may have added parameters that the budget does not suffice for, or
        changed the types of some.
        """
        self.export()
        self.close()
        self._say(f"policy {self.policy}: {reason}; {_FIRST_POLICY} goes on")
        self.policy, self._budget = _FIRST_POLICY, None

    def _leave(self, optimizer: torch.optim.Optimizer, reason: str) -> None:
        """Give the state back to torch, for good."""
        self.export()
        self._exported = None
        self.close()
        self._set_left(optimizer, reason)

    def _set_left(self, optimizer: torch.optim.Optimizer, reason: str) -> None:
        self.left = reason
        if "state" in optimizer.__dict__:
            move_to_params(optimizer.__dict__["state"])
        self._process.log.add("left", optimizer=self.number, reason=reason)
        self._say(f"left to torch: {reason}")

    def _note_plan(self, updater: ParamUpdater) -> None:
        plan = updater.plan
        if plan is not self._plan:
            self._plan = plan
            self._process.log.add("plan", optimizer=self.number, plan=plan.counts())
            counts = plan.counts().items()
            text = ", ".join(f"{count} x {kind}" for kind, count in counts)
            self._say(f"plan: {plan.remark or text}")

    def _say(self, text: str) -> None:
        step = self._process.log.step
        self._process.note(f"step {step}, optimizer {self.number}: {text}")


def _count_no_idle_steps(
    updater: ParamUpdater, counts: dict[torch.Tensor, int]
) -> None:
    """Restore the counts of SGD without momentum, which leaves no state, as in torch.

    The first step with momentum differs from those after it.
    """
    for group in updater.param_groups:
        if group.get("momentum") == 0:
            updater.steps |= {param: counts.get(param, 0) for param in group["params"]}


def _unscale_grads(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Write the gradients without their scale, as torch's fused kernels do."""
    params = params_of(optimizer)
    grads = [local_shard(one.grad) for one in params if one.grad is not None]
    if grads:
        with torch.no_grad():
            torch._foreach_mul_(grads, factor)


def _whole_entries(
    optimizer: torch.optim.Optimizer, updater: ParamUpdater
) -> dict[torch.Tensor, dict[str, Any]]:
    """Return the entries of an optimizer's state that are of a step."""
    moments = updater.moments
    return {
        param: entry
        for param, entry in optimizer.__dict__.get("state", {}).items()
        if param in moments and _is_of_step(entry, moments[param])
    }


def _is_of_step(entry: dict[str, Any], moments: Iterable[str]) -> bool:
    """Return whether an entry has all moments.

    Torch makes those of SGD without momentum empty, and those of a fused step that a
    scaler has skipped 0.
    """
    values = [entry.get(name) for name in moments]
    if any(value is None for value in values):
        return False
    is_initial = float(entry.get("step", 1)) == 0
    return not (is_initial and not any(local_shard(value).any() for value in values))


def _text(budget: Budget) -> str:
    if isinstance(budget, Mapping):
        return ", ".join(f"{bytes_text(own)} in {name}" for name, own in budget.items())
    return bytes_text(budget)
