"""Attempts of a job that fail in the middle; it drops the batch, and goes on."""

import signal
from contextlib import AbstractContextManager, ExitStack, suppress
from typing import Any

import torch
from torch import nn

from ebbtide.interleave.engine.errors import DeviceMemoryError
from tests.interleave.engine.forked import forked
from tests.interleave.engine.grid.job import Event
from tests.interleave.engine.grid.reference import ReferenceOptimizer
from tests.interleave.engine.grid.training import Training
from tests.interleave.engine.test_interrupts import LineFault

FAULTS = (
    "forward",
    "backward",
    "fork",
    "interrupt",
    "interrupted step",
    "allocation",
    "infinite",
)


class Broken(Exception):
    """The error of a layer."""


def attempt(training: Training, fault: Event) -> None:
    """Run a batch that fails, and drop its gradients."""
    if fault.kind == "infinite":
        _step_with_infinite_gradients(training)
        return
    if fault.kind == "interrupted step":
        _interrupt_step(training, fault)
        return
    with ExitStack() as stack:
        if fault.kind in ("forward", "backward"):
            break_layer(training, fault, stack)
        else:
            # The plain job, which does not fail, is not to change here.
            training.net.eval()
            stack.callback(training.net.train)
        if fault.kind == "interrupt" and not training.is_plain:
            stack.enter_context(_interrupted(fault))
        if fault.kind == "allocation" and training.device is not None:
            stack.enter_context(training.device.failing(fault.number % 12))
        try:
            loss = training.loss(torch.arange(6))
            if fault.kind == "fork" and not training.is_plain:
                forked(lambda: None)
            training.optimizer.scale(loss).backward()
        except (Broken, KeyboardInterrupt, torch.OutOfMemoryError, DeviceMemoryError):
            pass
    # Those of parameters that are in no group, too.
    training.net.zero_grad()


def _interrupted(fault: Event) -> AbstractContextManager[None]:
    return LineFault(fault.number, lambda: signal.raise_signal(signal.SIGINT)).armed()


def _interrupt_step(training: Training, fault: Event) -> None:
    """Interrupt a step, which is done as a whole or not at all; the plain job does it
    or not, too."""
    training.backward()
    if not training.is_plain:
        with suppress(KeyboardInterrupt), _interrupted(fault):
            training.optimizer.step()
        training.decided.append(updates(training))
    elif training.decided.pop(0) != updates(training):
        training.optimizer.step()
    training.optimizer.zero_grad()


def updates(training: Training) -> int:
    """Return how many updates parameters have had."""
    if isinstance(training.optimizer, ReferenceOptimizer):
        return training.optimizer.updates
    return sum(
        int(entry["step"])
        for entry in training.optimizer.state_dict()["state"].values()
    )


def break_layer(training: Training, fault: Event, stack: ExitStack) -> None:
    layer = training.net.layers[fault.number % len(training.net.layers)]
    child = [
        one for one in layer.modules() if not isinstance(one, torch.jit.ScriptModule)
    ][-1]

    def fail(*_: Any) -> None:
        raise Broken

    def fail_in_backward(_: nn.Module, __: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(fail)

    is_forward = fault.kind == "forward"
    hook = (
        child.register_forward_pre_hook(fail)
        if is_forward
        else layer.register_forward_hook(fail_in_backward)
    )
    stack.callback(hook.remove)


def _step_with_infinite_gradients(training: Training) -> None:
    loss = training.loss() * float("inf")
    training.optimizer.scale(loss).backward()
    training.optimizer.step()
    training.optimizer.zero_grad()
