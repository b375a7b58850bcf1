"""The device that parameters are on."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ebbtide.interleave.engine.devices.device import Device
from ebbtide.interleave.engine.devices.emulated import EmulatedDevice
from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.state_dict import local


def open_device(params: Sequence[torch.Tensor]) -> Device:
    """For parameters on a GPU that GPU; for parameters on the CPU an emulated device, without limits. Raises
    EngineError for parameters elsewhere."""
    kind = local(params[0]).device.type if params else "cpu"
    if kind == "cpu":
        return EmulatedDevice()
    if kind == "cuda":
        from ebbtide.interleave.engine.devices.cuda import CudaDevice

        return CudaDevice(local(params[0]).device)
    raise EngineError(f"the parameters are on a device of kind {kind}: move the model to a GPU or to the CPU first")
