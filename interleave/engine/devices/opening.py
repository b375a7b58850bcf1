"""Opens the device of the engine for a device of torch."""

import torch

from ebbtide.interleave.engine.devices.device import Device
from ebbtide.interleave.engine.devices.emulated import EmulatedDevice
from ebbtide.interleave.engine.errors import EngineError


def open_device(device: torch.device) -> Device:
    """Open a GPU, or an emulated device without limits for the CPU. Raises EngineError for a device of another kind."""
    if device.type == "cpu":
        return EmulatedDevice()
    if device.type == "cuda":
        from ebbtide.interleave.engine.devices.cuda import CudaDevice

        return CudaDevice(device)
    raise EngineError(
        f"the parameters are on a device of kind {device.type}: move the model to a GPU or to the CPU first"
    )
