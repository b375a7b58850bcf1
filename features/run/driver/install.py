"""Puts the driver under torch's optimizers, as soon as torch is imported."""

from __future__ import annotations

import atexit
import itertools
import multiprocessing.util
import os
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ebbtide.features.run.driver.groups import MUON, is_driven, params_of
from ebbtide.features.run.driver.layer_moves import LayerMoves
from ebbtide.features.run.driver.log import digest
from ebbtide.features.run.driver.optimizer_driver import OptimizerDriver
from ebbtide.features.run.driver.phase_memory import PhaseMemory
from ebbtide.features.run.driver.process import DrivenProcess
from ebbtide.features.run.driver.torch_state import (
    State,
    StateAttribute,
    loading_as_torch,
)
from ebbtide.features.run.options import RunOptions
from ebbtide.interleave.engine.param_updater import ParamUpdater
from ebbtide.interleave.engine.params.local_shards import local_shard
from ebbtide.profiler.agent.patches import Patches


def install_driver(
    options: RunOptions,
    note: Callable[[str], None],
    memory: PhaseMemory | None = None,
) -> Callable[[], None]:
    """Replace `step`, `state` and `load_state_dict` of torch's Adam, AdamW, SGD and
    Muon.

    No object changes its class, and no name of torch stands for another object. Return
    a function that ends the run and restores torch. `note` adds a note to the trace;
    `memory` has what is recorded.
    """
    process = DrivenProcess(options, note, memory)
    driver = TorchDriver(process)
    os.register_at_fork(after_in_child=driver.forget)
    atexit.register(driver.finish)
    return driver.close


class TorchDriver:
    """The replaced attributes of torch, and the functions behind them."""

    def __init__(self, process: DrivenProcess) -> None:
        self._process = process
        process.finish = self.finish
        # Whether something was driven in this process whose end is to be written.
        self._is_running = False
        self._numbers = itertools.count(1)
        self._patches = Patches()
        for owner in (torch.autograd, torch.autograd.graph):
            run_backward = self._counted(owner._engine_run_backward)
            self._patches.set(owner, "_engine_run_backward", run_backward)
        self._deepspeed: Any = None
        # The package itself may import torch, and is in part there then.
        engines = "deepspeed.runtime.engine"
        self._patches.when_imported(engines, self._hook_deepspeed)
        self._layers = LayerMoves(process) if process.options.moves_layers else None
        # AdamW inherits from Adam in newer versions of torch.
        kinds = [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD]
        kinds += [] if MUON is None else [MUON]
        self._originals = {
            kind: _unhooked(kind.step) for kind in kinds if "step" in vars(kind)
        }
        step = self._driven_step()
        for kind in self._originals:
            self._patches.set(kind, "step", step)
            if process.options.policy != "none":
                load = self._loading(kind.load_state_dict)
                self._patches.set(kind, "state", StateAttribute(self._export))
                self._patches.set(kind, "ebbtide_state", property(self._rows))
                self._patches.set(kind, "load_state_dict", load)

    def _hook_deepspeed(self, module: Any) -> None:
        from ebbtide.features.run.driver.deepspeed_engines import DeepSpeedEngines

        self._begin()
        self._deepspeed = DeepSpeedEngines(self._process)
        self._patches.wrap(module.DeepSpeedEngine, "__init__", self._deepspeed.making)

    def _driven_step(self) -> Any:
        def step(optimizer: Any, closure: Any = None) -> Any:
            return self._step(optimizer, closure)

        driven: Any = torch._disable_dynamo(step)
        # Torch's hooks look for what they wrap, and find no function of torch.
        vars(driven).pop("__wrapped__", None)
        driven.is_driven = True
        return driven

    def close(self) -> None:
        """End the run, and restore torch."""
        self.finish()
        atexit.unregister(self.finish)
        self._patches.undo()
        for kind in (torch.optim.AdamW, *torch.optim.AdamW.__subclasses__()):
            # Torch has hooked what they inherited.
            if getattr(vars(kind).get("step"), "is_driven", False):
                del kind.step

    def _counted(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that counts backwards, and logs what they begin from.

        Calls of `autograd.grad`, and backwards inside of others, do not count.
        """
        process = self._process

        def run_backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            if (
                not torch.compiler.is_compiling()
                and torch._C._current_graph_task_id() == -1
                and kwargs.get("accumulate_grad")
            ):
                process.backwards += 1
                if process.options.compares:
                    for output in outputs:
                        process.log.add_loss(output)
            return original(outputs, *args, **kwargs)

        return run_backward

    def finish(self) -> None:
        """Write the end of each optimizer, and of the parameters."""
        process = self._process
        if not self._is_running:
            return
        self._is_running = False
        if self._layers is not None:
            self._layers.close()
        if self._deepspeed is not None:
            self._deepspeed.log_ends()
        for driver in list(process.drivers.values()):
            driver.close()
            self._end(driver)
        process.close()
        if process.options.compares:
            self._write_params()
        process.log.flush()

    def forget(self) -> None:
        """Leave the end of what was driven to the process that this one is a fork of.

        What this process drives later is its own.
        """
        self._is_running = False
        self._process.log.forget()

    def _begin(self) -> None:
        """Write the end of the run when this process ends."""
        if not self._is_running and multiprocessing.parent_process() is not None:
            # A process that was forked calls no function of `atexit`.
            multiprocessing.util.Finalize(None, self.finish, exitpriority=0)
        self._is_running = True

    def _end(self, driver: OptimizerDriver) -> None:
        self._process.log.add(
            "end",
            optimizer=driver.number,
            policy=driver.policy if driver.steps else None,
            steps=driver.steps,
            left=driver.left,
            **driver.figures.result or driver.figures_of_torch(),
        )

    def _end_of_deleted(self, driver: OptimizerDriver) -> None:
        if self._is_running:
            driver.release()
            self._end(driver)

    def _write_params(self) -> None:
        """Write the parameters of all optimizers beside the log."""
        log = self._process.log
        params = [
            local_shard(param).detach().cpu().clone()
            for optimizer in self._process.kept
            for param in params_of(optimizer)
        ]
        if self._deepspeed is not None:
            parts = self._deepspeed.params()
            params += [part.detach().cpu().clone() for part in parts]
        log.add("final", bits=digest(params))
        if log.path is not None:
            torch.save(params, log.path.replace(".jsonl", ".pt"))
        self._process.kept.clear()

    def _step(self, optimizer: Any, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._begin()
        driver, log = self._driver_of(optimizer), self._process.log
        if self._process.options.compares and not log.step:
            self._log_start(optimizer, driver.number)
        driver.step(optimizer, self._torch_step)
        log.step = max(log.step, driver.iterations)
        log.flush()
        drivers = self._process.drivers.values()
        self._process.end_after_steps(min(own.iterations for own in drivers))
        return loss

    def _log_start(self, optimizer: Any, number: int) -> None:
        """Log the parameters and gradients before the first step of an optimizer."""
        log, params = self._process.log, params_of(optimizer)
        grads = [param.grad for param in params if param.grad is not None]
        size = sum(local_shard(param).numel() for param in params)
        log.add("start", bits=digest(params), optimizer=number, params=size)
        log.add("gradient", bits=digest(grads), optimizer=number)
        if self._process.options.other_kernels:
            for group in optimizer.param_groups:
                group["fused"] = not group.get("fused")
                group["foreach"] = None

    def _driver_of(self, optimizer: Any) -> OptimizerDriver:
        drivers = self._process.drivers
        driver = drivers.get(optimizer)
        if driver is None:
            driver = OptimizerDriver(optimizer, self._process, next(self._numbers))
            drivers[optimizer] = driver
            end = weakref.finalize(optimizer, self._end_of_deleted, driver)
            end.atexit = False
            if self._process.options.compares:
                self._process.kept.append(optimizer)
        return driver

    def _torch_step(self, optimizer: Any) -> None:
        kinds = self._originals.items()
        step = next(step for kind, step in kinds if isinstance(optimizer, kind))
        step(optimizer)

    def _export(self, optimizer: Any) -> State | None:
        driver = self._process.drivers.get(optimizer)
        return None if driver is None else driver.export()

    def _rows(self, optimizer: Any) -> list[tuple[str, torch.Tensor]]:
        """Return the state as the engine has it, for recordings."""
        driver = self._process.drivers.get(optimizer)
        if driver is None or driver.updater is None:
            raise AttributeError("ebbtide_state")
        updater: ParamUpdater = driver.updater
        return updater.ebbtide_state

    def _loading(self, original: Callable[..., None]) -> Callable[..., None]:
        as_torch = original
        keeping = loading_as_torch(original)

        def load_state_dict(optimizer: Any, state_dict: Any) -> None:
            driver = self._process.drivers.get(optimizer)
            is_left = not is_driven(type(optimizer)) or (
                driver is not None and driver.left is not None
            )
            (as_torch if is_left else keeping)(optimizer, state_dict)

        return load_state_dict


def _unhooked(step: Any) -> Any:
    """Return a step without the hooks that torch adds when an optimizer is made."""
    return step.__wrapped__ if getattr(step, "hooked", False) else step
