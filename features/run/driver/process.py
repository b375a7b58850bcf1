"""Options, log and devices that all drivers of a process share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ebbtide.features.run.driver.called_models import CalledModels, needs_model
from ebbtide.features.run.driver.log import RunLog
from ebbtide.features.run.driver.phase_memory import PhaseMemory
from ebbtide.features.run.options import RunOptions
from ebbtide.interleave.engine.devices.device import Device
from ebbtide.interleave.engine.devices.emulated import EmulatedDevice
from ebbtide.interleave.engine.devices.opening import open_device

Step = Callable[..., Any]


class DrivenProcess:
    """The drivers of a process, by optimizer, and what they share.

    Attributes:
        memory: The job's memory by phase; None where it is not recorded.
        finish: Writes the end of the log.
        backwards: How many backwards have begun.
        models: The modules that were called; None where no policy needs them.
        kept: The optimizers that have stepped, where their parameters are compared at
            the end.
    """

    def __init__(
        self,
        options: RunOptions,
        note: Callable[[str], None],
        memory: PhaseMemory | None = None,
    ) -> None:
        self.options = options
        self.note = note
        self.memory = memory
        self.log = RunLog(options.folder)
        self.backwards = 0
        self.models = CalledModels() if needs_model(options.policy) else None
        self.drivers: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        self.finish: Callable[[], None] = lambda: None
        self.kept: list[torch.optim.Optimizer] = []
        self._devices: dict[torch.device, Device] = {}

    def device_for(self, device: torch.device) -> Device:
        """Return the engine's device for one of torch: one for all optimizers."""
        if device not in self._devices:
            self._devices[device] = self._open_device(device)
        return self._devices[device]

    def _open_device(self, device: torch.device) -> Device:
        if device.type != "cpu":
            return open_device(device)
        link = self.options.link_bytes_per_s
        return EmulatedDevice(None, link, link, self.options.gpu_params_per_s)

    def end_after_steps(self, steps: int) -> None:
        """End the process after as many iterations as the options say."""
        if self.options.steps is not None and steps >= self.options.steps:
            self.finish()
            raise SystemExit(0)

    def close(self) -> None:
        """Close all devices, whose engines are closed."""
        if self.models is not None:
            self.models.close()
        for device in self._devices.values():
            device.close()
        self._devices.clear()
