"""Matches the GPUs of a rank, as torch names them, with the sampled GPUs."""

from collections.abc import Iterable
from typing import Any

from ebbtide.profiler.sampler.gpu import same_gpu

_NVML_KEYS = (
    "pci_bus_id",
    "link",
    "driver",
    "parent_uuid",
    "link_missing",
    "numa_node",
)


def sampled_gpu(
    device: dict[str, Any], gpus: Iterable[dict[str, Any]]
) -> dict[str, Any] | None:
    """Return the sampler's description of a rank's device; None if it has none. CUDA
    may give a MIG device the UUID of its card. That is enough where the sampler sees
    one MIG device of the card."""
    uuid = device.get("uuid")
    if uuid is None:
        return None
    mig_devices = []
    for gpu in gpus:
        if same_gpu(gpu.get("uuid"), uuid):
            return gpu
        if same_gpu(gpu.get("parent_uuid"), uuid):
            mig_devices.append(gpu)
    return mig_devices[0] if len(mig_devices) == 1 else None


def nvml_info(device: dict[str, Any], gpus: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return what NVML reported of the GPU that torch calls `device`."""
    gpu = sampled_gpu(device, gpus) or {}
    return {key: gpu[key] for key in _NVML_KEYS if key in gpu}


def device_names(
    devices: Iterable[dict[str, Any]], gpus: list[dict[str, Any]]
) -> dict[int, str]:
    """Return the rank's names of its devices by their NVML number."""
    matches = ((device, sampled_gpu(device, gpus)) for device in devices)
    return {
        gpu["index"]: device["device"]
        for device, gpu in matches
        if gpu is not None and "index" in gpu
    }


def notes_on_devices(
    devices: Iterable[dict[str, Any]], host: dict[str, Any]
) -> list[str]:
    """Return a line for each GPU of a rank that was not sampled, with the reason.

    Samples are of memory, link and state.
    """
    gpus = host.get("gpus") or []
    notes = []
    for device in devices:
        if device.get("kind") == "cuda" and sampled_gpu(device, gpus) is None:
            notes.append(f"{device['device']} was not sampled: {_reason(device, host)}")
    return notes


def note_on_unused_gpus(
    processes: Iterable[list[dict[str, Any]]], host: dict[str, Any]
) -> str | None:
    """Return a line on the samples of GPUs if no recorded process used a GPU.

    Return None if one did, or there are none.
    """
    gpus = host.get("gpus") or []
    listed = list(processes)
    if (
        not gpus
        or not listed
        or any(device.get("kind") == "cuda" for devices in listed for device in devices)
    ):
        return None
    count = "the GPU" if len(gpus) == 1 else f"the {len(gpus)} GPUs"
    return (
        f"no recorded process used a GPU: the samples of {count} of this host are not "
        "in the trace"
    )


def _reason(device: dict[str, Any], host: dict[str, Any]) -> str:
    if host.get("nvml"):
        return str(host["nvml"])
    if any(
        same_gpu(gpu.get("parent_uuid"), device.get("uuid"))
        for gpu in host.get("gpus") or []
    ):
        return (
            "CUDA gave the UUID of its card, which has several MIG devices; set "
            "CUDA_VISIBLE_DEVICES to one of them"
        )
    return (
        "NVML shows no GPU with its UUID, "
        f"{device.get('uuid') or 'which CUDA did not give'}"
    )
