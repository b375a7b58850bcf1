"""Opens the device that parameters are on."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ebbtide.interleave.engine.devices.device import Device
from ebbtide.interleave.engine.devices.emulated import EmulatedDevice
from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.local_shards import local_shard


def device_of(params: Sequence[torch.Tensor]) -> torch.device:
    """Return the device that parameters are on; the CPU if there are none."""
    return local_shard(params[0]).device if params else torch.device("cpu")


def open_device(params: Sequence[torch.Tensor]) -> Device:
    """Open the GPU that parameters are on, or an emulated device without limits for parameters on the CPU.

    Raises:
        EngineError: If the parameters are on a device of another kind.
    """
    device = device_of(params)
    if device.type == "cpu":
        return EmulatedDevice()
    if device.type == "cuda":
        from ebbtide.interleave.engine.devices.cuda import CudaDevice

        return CudaDevice(device)
    raise EngineError(
        f"the parameters are on a device of kind {device.type}: move the model to a GPU or to the CPU first"
    )
