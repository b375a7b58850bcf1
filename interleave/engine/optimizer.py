"""AdamW with an fp32 master and state where a policy puts it, with the same bits under every policy."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

import torch

from ebbtide.interleave.engine.adaptive.budget import Budget
from ebbtide.interleave.engine.adaptive.runner import AdaptiveRunner
from ebbtide.interleave.engine.checks import check_group, check_options, check_params
from ebbtide.interleave.engine.devices.device import Device
from ebbtide.interleave.engine.devices.open import open_device
from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.gradient_collector import GradientCollector
from ebbtide.interleave.engine.gradient_norm import GradientNorm
from ebbtide.interleave.engine.local_shards import local_shard
from ebbtide.interleave.engine.numerics.loss_scale import LossScale
from ebbtide.interleave.engine.numerics.reference import Hyper
from ebbtide.interleave.engine.runtime.engine import Engine
from ebbtide.interleave.engine.runtime.layout import divide
from ebbtide.interleave.engine.state_dict import (
    gather_states,
    initial_state,
    make_entry,
    read_state_dict,
    scatter_states,
    update_master,
)
from ebbtide.interleave.model.plan import Plan
from ebbtide.interleave.model.schedule import Schedule
from ebbtide.machines.machine import Machine

log = logging.getLogger("ebbtide")

_SUBGROUP_PARAMS = 100_000_000


class InterleavedAdamW(torch.optim.Optimizer):  # type: ignore[misc]
    """torch.optim.AdamW with an fp32 master, for parameters whose optimizer state does not fit on the device.

    Parameters have the same bits under every policy (`reference` defines them).

    Args:
        params: Parameters or parameter groups, as for torch.optim.AdamW.
        lr: As for torch.optim.AdamW, like `betas`, `eps` and `weight_decay`.
        policy: As for `ebbtide replay`; `adaptive` makes new plans while the job runs.
        machine: The first rates. By default, `adaptive` measures this machine for a fraction of a second.
        subgroup_params: Number of parameters whose state is moved and updated as one.
        memory_budget: Bytes of device memory for state, or a dict of bytes by phase (`forward`, `backward`, `update`).
            By default, what the device has free.
        max_grad_norm: Maximum norm of all gradients, over all ranks; larger ones are clipped. None to not clip.
        gradients: `kept` in `p.grad` until the step, or `streamed` to the host as soon as the backward has computed
            them; then only the optimizer can clip and scale them.
        loss_scale: A number, or `dynamic`. Then back-propagate `scale(loss)`, and a step with a gradient that is not
            finite is skipped.
        device: By default the device of the parameters; for parameters on the CPU an emulated one.
        threads: Number of threads for updates on the CPU; by default all cores of this rank.

    Raises:
        EngineError: If a parameter or an option is not supported.
        PolicyError: If the policy is not valid.
        MachineError: If the machine lacks a rate that the policy needs.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        policy: str = "adaptive",
        machine: Machine | None = None,
        subgroup_params: int = _SUBGROUP_PARAMS,
        memory_budget: Budget | None = None,
        max_grad_norm: float | None = None,
        gradients: Literal["kept", "streamed"] = "kept",
        loss_scale: float | Literal["dynamic"] | None = None,
        device: Device | None = None,
        threads: int | None = None,
    ) -> None:
        self._params: list[torch.Tensor] = []
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        check_group(defaults)
        check_options(gradients, subgroup_params, threads, memory_budget)
        super().__init__(params, defaults)
        self._subgroup_params = subgroup_params
        self._streamed = gradients == "streamed"
        self._loss_scale = LossScale(loss_scale)
        self._versions: list[int] = []
        self._collector: GradientCollector
        own_params = self._params_with_state()
        check_params(own_params, self._streamed)
        # The caller closes a device that it passes.
        own_device = device or open_device(own_params)
        self._runner = AdaptiveRunner(
            policy, machine, memory_budget, threads, self._streamed, own_device, owns_device=device is None
        )
        self._norm = GradientNorm(own_device, max_grad_norm)
        try:
            self._rebuild(own_params, [initial_state(param) for param in own_params])
        except BaseException:
            self._runner.close()
            raise

    @property
    def last_schedule(self) -> Schedule | None:
        """The measured schedule of the last step; None before the first."""
        return None if self._runner.closed else self._runner.engine.last_schedule

    @property
    def plan(self) -> Plan:
        """The plan of the next step."""
        return self._runner.plan

    @property
    def machine(self) -> Machine:
        """The rates for planning, corrected by the steps so far."""
        return self._runner.planner.machine

    @property
    def loss_scale(self) -> float:
        """The current factor for losses."""
        return self._loss_scale.value

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss to back-propagate: the loss times the loss scale."""
        return loss * self._loss_scale.value

    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Update all parameters that have a gradient.

        Args:
            closure: Not supported.

        Raises:
            EngineError: For a closure, and for a gradient that is not finite; nothing is changed then. Also if an
                operation failed: the step is completed on the CPU, unless the message says that the state is lost.
        """
        if closure is not None:
            raise EngineError("step() takes no closure: call loss.backward() before it")
        engine = self._runner.engine
        own_params = set(self._params)
        if any(param.grad is not None and param not in own_params for param in self._params_with_state()):
            self._add_params()
            engine = self._runner.engine
        self._update_changed_masters(engine)
        gradients = self._collector.collect()
        if not engine.is_running:
            self._runner.set_plan()
        engine.submit_gradients(gradients)
        # The norm is computed while the gradients are copied to the host.
        for index, gradient in gradients.items():
            self._norm.add(index, gradient)
        updated = gradients.keys() | engine.offloaded_params
        scale = self._norm.scale_factor(self._params, self._loss_scale.value)
        self._loss_scale.update(scale is not None)
        if scale is None:
            self._skip_step(engine)
            return
        hypers = self._hypers()
        scalars = [
            hypers[param].scalars(self._step_count(param) + 1, scale) if index in updated else None
            for index, param in enumerate(self._params)
        ]
        values = [local_shard(param).detach().view(-1) for param in self._params]
        self._runner.step(values, scalars, lambda: self._end_step(updated))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Also update the parameters of a group from now on.

        Raises:
            EngineError: If the parameters or hyperparameters are not supported; nothing is changed.
        """
        check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)
        if not self._params:
            return
        try:
            self._add_params()
        except BaseException:
            self.param_groups.pop()
            raise

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of torch.optim.AdamW, with the fp32 master in addition to the moments, on the host."""
        state_dict: dict[str, Any] = super().state_dict()
        engine = self._runner.engine
        self._collector.recall()
        index = {param: number for number, param in enumerate(self._group_params())}
        for param, state in zip(self._params, gather_states(engine.store.states, self._params), strict=True):
            if self._step_count(param):
                state_dict["state"][index[param]] = make_entry(param, state, self._step_count(param))
        if self._loss_scale.skips_steps:
            state_dict["loss_scale"] = self._loss_scale.state_dict()
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what this optimizer (under any policy) or torch.optim.AdamW saved.

        A state dict without masters is exact for fp32 parameters; for others the masters start from the parameters.

        Raises:
            EngineError: If it is not a state dict of this model; nothing is changed.
        """
        loaded = read_state_dict(
            state_dict,
            self.param_groups,
            self.defaults,
            set(self._params),
            lambda params: check_params(params, self._streamed),
        )
        if "loss_scale" in state_dict:
            self._loss_scale.load_state_dict(state_dict["loss_scale"])
        engine = self._runner.engine
        self._collector.recall()
        if len(loaded.params) > len(self._params):
            self._rebuild(loaded.params, loaded.states)
        else:
            scatter_states(engine.store.states, loaded.states)
        for group, own_group in zip(state_dict["param_groups"], self.param_groups, strict=True):
            own_group.update({key: value for key, value in group.items() if key != "params"})
        self.state.clear()
        for param, step in zip(loaded.params, loaded.steps, strict=True):
            if step:
                self._set_step_count(param, step)
        self._versions = [local_shard(param)._version for param in self._params]

    def close(self) -> None:
        """End the threads and release all memory; it cannot step afterwards. Deleting it does the same."""
        self._collector.close()
        self._runner.close()

    def _skip_step(self, engine: Engine) -> None:
        """Drop the gradients, of which one is not finite. Raises EngineError if there is no loss scale."""
        self._collector.end_step()
        engine.discard()
        if not self._loss_scale.skips_steps:
            raise EngineError("a gradient is infinite or not a number: this step was skipped, nothing was changed")
        log.info("ebbtide: a gradient is not finite: step skipped, loss scale now %g", self._loss_scale.value)

    def _end_step(self, updated: Collection[int]) -> None:
        """Count a step for the parameters of these indices."""
        for index in updated:
            self._set_step_count(self._params[index], self._step_count(self._params[index]) + 1)
        self._versions = [local_shard(param)._version for param in self._params]
        self._collector.end_step()

    def _group_params(self) -> list[torch.Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def _params_with_state(self) -> list[torch.Tensor]:
        """Return the parameters that need state, each once: those that are not frozen, or were not frozen before."""
        own_params = set(self._params)
        return [param for param in dict.fromkeys(self._group_params()) if param.requires_grad or param in own_params]

    def _step_count(self, param: torch.Tensor) -> int:
        return int(self.state[param]["step"]) if param in self.state else 0

    def _set_step_count(self, param: torch.Tensor, steps: int) -> None:
        """Set how often a parameter was updated, in `state`, since tools of torch look there for existing state."""
        self.state[param] = {"step": steps}

    def _hypers(self) -> dict[torch.Tensor, Hyper]:
        hypers = {}
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            hyper = Hyper(float(group["lr"]), beta1, beta2, group["eps"], group["weight_decay"])
            hypers.update(dict.fromkeys(group["params"], hyper))
        return hypers

    def _add_params(self) -> None:
        """Add the parameters that are new or were frozen."""
        engine = self._runner.engine
        params = self._params_with_state()
        check_params(params, self._streamed)
        self._collector.recall()
        states = dict(zip(self._params, gather_states(engine.store.states, self._params), strict=True))
        self._rebuild(params, [states[param] if param in states else initial_state(param) for param in params])

    def _rebuild(self, params: Sequence[torch.Tensor], states: Sequence[torch.Tensor]) -> None:
        """Divide these parameters into subgroups, with these states and a new plan."""
        subgroups = divide([local_shard(param) for param in params], self._subgroup_params)
        engine = self._runner.rebuild(subgroups, len(params))
        if self._params:
            self._collector.close()
        self._collector = GradientCollector(params, engine, self._norm, self._streamed)
        self._params = list(params)
        self._versions = [local_shard(param)._version for param in params]
        scatter_states(engine.store.states, states)
        self._runner.set_plan()

    def _update_changed_masters(self, engine: Engine) -> None:
        """Update the masters of parameters that the job has changed since the last step, by loading a model perhaps."""
        changed = {
            index
            for index, (param, version) in enumerate(zip(self._params, self._versions, strict=True))
            if local_shard(param)._version != version
        }
        if not changed:
            return
        self._collector.recall()
        states = gather_states(engine.store.states, self._params)
        for index in changed:
            update_master(states[index], self._params[index])
        scatter_states(engine.store.states, states)
