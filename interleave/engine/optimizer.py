"""AdamW with an fp32 master, its state wherever a policy puts it, to the same bits under every policy."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

import torch

from ebbtide.interleave.engine import state_dict as portable
from ebbtide.interleave.engine.adaptive.planner import Budget
from ebbtide.interleave.engine.adaptive.runner import Driver
from ebbtide.interleave.engine.checks import check_group, check_options, check_params
from ebbtide.interleave.engine.devices.device import Device
from ebbtide.interleave.engine.devices.open import open_device
from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.gradient_collector import Intake
from ebbtide.interleave.engine.gradients import Gradients
from ebbtide.interleave.engine.numerics.loss_scale import LossScale
from ebbtide.interleave.engine.numerics.reference import Hyper
from ebbtide.interleave.engine.runtime.engine import Engine
from ebbtide.interleave.engine.runtime.layout import divide
from ebbtide.interleave.engine.runtime.store import MASTER
from ebbtide.interleave.engine.state_dict import local
from ebbtide.interleave.model.plan import Plan
from ebbtide.interleave.model.schedule import Schedule
from ebbtide.machines.machine import Machine

log = logging.getLogger("ebbtide")

_SUBGROUP_PARAMS = 100_000_000


class InterleavedAdamW(torch.optim.Optimizer):  # type: ignore[misc]
    """torch.optim.AdamW with an fp32 master, for parameters whose optimizer state does not fit on the device.

    Parameters do not depend on the policy by a single bit (`reference` says which bits they are).

    policy: as `ebbtide replay` takes it; `adaptive` keeps watching and plans anew. machine: the rates it begins with;
    without it, a look at this machine that takes a fraction of a second. subgroup_params: how much state moves as one.
    memory_budget: bytes of device memory that state may take, or a dict of them by phase (`forward`, `backward`,
    `update`); without it, what the device has free. max_grad_norm: clip the norm of all gradients, over all ranks, to
    this. gradients: `kept` in `p.grad` until the step, or `streamed` to the host as soon as the backward has made them;
    then the optimizer alone clips and scales. loss_scale: a number, or `dynamic`: back-propagate `scale(loss)`; a step
    with a gradient that is not finite is left out then. device: without it, the one where the parameters are: for
    parameters on the CPU an emulated one. threads: of the CPU's updates; all cores of this rank without it.

    Raises EngineError for parameters that it cannot take, PolicyError and MachineError for a policy that cannot be.
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
        self._streams = gradients == "streamed"
        self._loss_scale = LossScale(loss_scale)
        self._versions: list[int] = []
        self._intake: Intake
        wanted = self._wanted()
        check_params(wanted, self._streams)
        # What is given is somebody else's to close.
        opened = device or open_device(wanted)
        self._driver = Driver(policy, machine, memory_budget, threads, self._streams, opened, owns=device is None)
        self._gradients = Gradients(opened, max_grad_norm)
        try:
            self._take(wanted, [portable.fresh(param) for param in wanted])
        except BaseException:
            self._driver.close()
            raise

    @property
    def last_schedule(self) -> Schedule | None:
        """What the last step was measured to do; None before the first."""
        return None if self._driver.closed else self._driver.engine.last

    @property
    def plan(self) -> Plan:
        """The plan that the next step goes by."""
        return self._driver.plan

    @property
    def machine(self) -> Machine:
        """The rates that are planned with, as the steps so far have shown them."""
        return self._driver.planner.machine

    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Update all parameters that have a gradient.

        Raises EngineError, and changes nothing, for a closure and for a gradient that is not finite. Where an operation
        fails the step is done all the same, on the CPU, and EngineError says what failed; only where it says that the
        state is lost it is."""
        if closure is not None:
            raise EngineError("step() takes no closure: call loss.backward() before it")
        engine = self._driver.engine
        known = set(self._params)
        if any(param.grad is not None and param not in known for param in self._wanted()):
            self._retake()
            engine = self._driver.engine
        self._follow_changes(engine)
        gradients = self._intake.collect()
        if not engine.under_way:
            self._driver.follow()
        engine.give(gradients)
        # They come down while their norm is taken.
        for index, gradient in gradients.items():
            self._gradients.note(index, gradient)
        there = gradients.keys() | engine.taken
        scale = self._gradients.scale(self._params, self._loss_scale.value)
        self._loss_scale.stepped(scale is not None)
        if scale is None:
            self._leave_out(engine)
            return
        hypers = self._hypers()
        scalars = [
            hypers[param].scalars(self._steps_of(param) + 1, scale) if index in there else None
            for index, param in enumerate(self._params)
        ]
        values = [local(param).detach().view(-1) for param in self._params]
        self._driver.step(values, scalars, lambda: self._count(there))

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to back-propagate: multiplied with the loss scale."""
        return loss * self._loss_scale.value

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied with at present."""
        return self._loss_scale.value

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Also update these parameters, from now on. Raises EngineError, and changes nothing, where it cannot."""
        check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)
        if not self._params:
            return
        try:
            self._retake()
        except BaseException:
            self.param_groups.pop()
            raise

    def state_dict(self) -> dict[str, Any]:
        """As torch.optim.AdamW's, with the fp32 master beside the moments; on the host."""
        found: dict[str, Any] = super().state_dict()
        engine = self._driver.engine
        self._intake.give_back()
        index = {param: number for number, param in enumerate(self._in_groups())}
        for param, state in zip(self._params, portable.gathered(engine.store, self._params), strict=True):
            if self._steps_of(param):
                found["state"][index[param]] = portable.entry(param, state, self._steps_of(param))
        if self._loss_scale.skips:
            found["loss_scale"] = self._loss_scale.state()
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what this optimizer or torch.optim.AdamW saved, under whatever policy. A state dict without masters
        is exact for fp32 parameters; for others the master starts from the parameter. Raises EngineError, and changes
        nothing, for the state of another model."""
        groups, saved = state_dict.get("param_groups"), state_dict.get("state")
        if not isinstance(groups, list) or not isinstance(saved, dict):
            raise EngineError("this is no state dict of an optimizer: it has no param_groups or no state")
        if not all(isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups):
            raise EngineError("this is no state dict of an optimizer: its param_groups have no params")
        lengths = [len(group["params"]) for group in groups], [len(group["params"]) for group in self.param_groups]
        if lengths[0] != lengths[1]:
            raise EngineError(
                f"this is the state dict of another model: its groups have {lengths[0]} parameters, these {lengths[1]}"
            )
        for group in groups:
            check_group({**self.defaults, **group})
        names = [name for group in groups for name in group["params"]]
        by_param = dict(zip(self._in_groups(), names, strict=True))
        # Those that are frozen now may have been updated before.
        known = set(self._params)
        params = [param for param, name in by_param.items() if param in known or name in saved]
        check_params(params, self._streams)
        states, steps = [], []
        for param in params:
            found, where = saved.get(by_param[param]), f"state of parameter {by_param[param]}"
            state, step = portable.parse(param, found, where) if found is not None else (portable.fresh(param), 0)
            states.append(state)
            steps.append(step)
        if "loss_scale" in state_dict:
            self._loss_scale.load(state_dict["loss_scale"])
        engine = self._driver.engine
        self._intake.give_back()
        if len(params) > len(self._params):
            self._take(params, states)
        else:
            portable.scatter(engine.store, states)
        for group, own in zip(groups, self.param_groups, strict=True):
            own.update({key: value for key, value in group.items() if key != "params"})
        self.state.clear()
        for param, step in zip(params, steps, strict=True):
            if step:
                self._stepped(param, step)
        self._versions = [local(param)._version for param in self._params]

    def close(self) -> None:
        """End threads and give all memory back; it cannot step afterwards. Deleting it does the same."""
        self._intake.close()
        self._driver.close()

    def _leave_out(self, engine: Engine) -> None:
        """No step: a gradient is not finite. Raises EngineError where nothing says that this may happen."""
        self._intake.stepped()
        engine.drop()
        if not self._loss_scale.skips:
            raise EngineError("a gradient is infinite or not a number: this step was left out, nothing was changed")
        log.info("ebbtide: a gradient is not finite: step left out, loss scale now %g", self._loss_scale.value)

    def _count(self, there: Collection[int]) -> None:
        """The parameters of these indices have made a step."""
        for index in there:
            self._stepped(self._params[index], self._steps_of(self._params[index]) + 1)
        self._versions = [local(param)._version for param in self._params]
        self._intake.stepped()

    def _in_groups(self) -> list[torch.Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def _wanted(self) -> list[torch.Tensor]:
        """Parameters to keep state of: those that are not frozen, once each, and those that were not."""
        known = set(self._params)
        return [param for param in dict.fromkeys(self._in_groups()) if param.requires_grad or param in known]

    def _steps_of(self, param: torch.Tensor) -> int:
        """How often a parameter has been updated."""
        return int(self.state[param]["step"]) if param in self.state else 0

    def _stepped(self, param: torch.Tensor, steps: int) -> None:
        """Where torch's own tools look whether there is state yet."""
        self.state[param] = {"step": steps}

    def _hypers(self) -> dict[torch.Tensor, Hyper]:
        found = {}
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            hyper = Hyper(float(group["lr"]), beta1, beta2, group["eps"], group["weight_decay"])
            found.update(dict.fromkeys(group["params"], hyper))
        return found

    def _retake(self) -> None:
        """Take parameters in that were not there, or frozen."""
        engine = self._driver.engine
        wanted = self._wanted()
        check_params(wanted, self._streams)
        self._intake.give_back()
        known = dict(zip(self._params, portable.gathered(engine.store, self._params), strict=True))
        self._take(wanted, [known[param] if param in known else portable.fresh(param) for param in wanted])

    def _take(self, params: Sequence[torch.Tensor], states: Sequence[torch.Tensor]) -> None:
        """Keep state of these parameters, in subgroups, by a plan of their own."""
        subgroups = divide([local(param) for param in params], self._subgroup_params)
        engine = self._driver.take(subgroups, len(params))
        if self._params:
            self._intake.close()
        self._intake = Intake(params, engine, self._gradients, self._streams)
        self._params = list(params)
        self._versions = [local(param)._version for param in params]
        portable.scatter(engine.store, states)
        self._driver.follow()

    def _follow_changes(self, engine: Engine) -> None:
        """Where somebody else has changed a parameter since the last step (loaded a checkpoint into the model, say) its
        master follows."""
        changed = {
            index
            for index, (param, version) in enumerate(zip(self._params, self._versions, strict=True))
            if local(param)._version != version
        }
        if not changed:
            return
        self._intake.give_back()
        states = portable.gathered(engine.store, self._params)
        for index in changed:
            value = local(self._params[index]).detach().reshape(-1).cpu()
            master = states[index][MASTER]
            different = master.to(value.dtype) != value
            master[different] = value[different].float()
        portable.scatter(engine.store, states)
