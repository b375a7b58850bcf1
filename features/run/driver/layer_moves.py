"""Moves weights and activations of the job's model: `--weights`, `--activations`."""

from __future__ import annotations

from typing import Any

import torch

from ebbtide.errors import UserError
from ebbtide.features.run.driver.process import DrivenProcess
from ebbtide.interleave import move_layers


class LayerMoves:
    """Moves the layers of the first module that is called and has some.

    Modules inside others are called after them, so this is the outermost one.
    """

    def __init__(self, process: DrivenProcess) -> None:
        self._process = process
        self._reason = "no module was called"
        self._moved: Any = None
        register = torch.nn.modules.module.register_module_forward_pre_hook
        self._handle = register(self._before_forward)

    def _before_forward(self, module: torch.nn.Module, _: Any) -> None:
        options, log = self._process.options, self._process.log
        if not any(param.requires_grad for param in module.parameters()):
            return
        try:
            self._moved = move_layers(
                module, weights=options.weights, activations=options.activations
            )
        except UserError as error:
            self._reason = str(error)
            return
        self._handle.remove()
        name = type(module).__name__
        text = f"weights={options.weights}, activations={options.activations}"
        log.add("layers", module=name, choices=text)
        self._process.note(f"layers of {name}: {text}")

    def close(self) -> None:
        """Log why nothing was moved, if so; move nothing from now on."""
        self._handle.remove()
        if self._moved is None:
            self._process.log.add("left", reason=f"layers stay: {self._reason}")
        else:
            self._moved.close()
