"""Opens the device of the engine for a device of torch."""

from typing import TypeAlias, cast

import torch

from ebbtide.interleave.engine.devices.device import Device
from ebbtide.interleave.engine.devices.emulated import EmulatedDevice
from ebbtide.interleave.engine.errors import EngineError

DeviceArgument: TypeAlias = Device | torch.device | str


def as_device(device: object) -> Device | None:
    """Return a device, or open the one that torch has a name for; None for None. Raises
    EngineError for another."""
    if isinstance(device, str | torch.device):
        return open_device(_named(device))
    if device is not None and not hasattr(device, "allocate_state"):
        raise EngineError(
            f"device is {device!r:.80}: it must be a name like 'cpu' or 'cuda:0', or "
            "an EmulatedDevice"
        )
    return cast(Device | None, device)


def is_same_device(device: DeviceArgument, opened: Device) -> bool:
    """Return whether an argument stands for a device that is open."""
    if not isinstance(device, str | torch.device):
        return device is opened
    named, own = _named(device), opened.torch_device
    return bool(named.type == own.type and named.index in (None, own.index))


def _named(device: str | torch.device) -> torch.device:
    try:
        return torch.device(device)
    except RuntimeError:
        raise EngineError(
            f"device is {device!r}: it must be a name like 'cpu' or 'cuda:0'"
        ) from None


def open_device(device: torch.device) -> Device:
    """Open a GPU, or an emulated device without limits for the CPU. Raises EngineError
    for a device of another kind."""
    if device.type == "cpu":
        return EmulatedDevice()
    if device.type == "cuda":
        from ebbtide.interleave.engine.devices.cuda import CudaDevice

        return CudaDevice(device)
    raise EngineError(
        f"a device of kind {device.type} cannot be driven: move the model to a GPU or "
        "to the CPU first"
    )
