"""The GPUs that a dry run can name: what the job sees of them."""

from __future__ import annotations

from ebbtide.features.dryrun.gpu import FakedGpu, capability_of
from ebbtide.features.dryrun.memory.kernel_buffers import workspace_bytes
from ebbtide.features.dryrun.start import _device_name
from ebbtide.machines.catalog import find_machine, presets
from ebbtide.machines.machine import GpuCompute

CAPABILITIES = {
    **dict.fromkeys(("v100-16gb", "v100-32gb"), (7, 0)),
    "t4": (7, 5),
    **dict.fromkeys(("a10", "a40", "a6000", "rtx3060", "rtx3080", "rtx3090"), (8, 6)),
    **dict.fromkeys(("l4", "l40s", "rtx6000-ada", "rtx4060", "rtx4060ti-16gb"), (8, 9)),
    **dict.fromkeys(("rtx4070", "rtx4080", "rtx4090", "rtx4090-laptop"), (8, 9)),
    **dict.fromkeys(
        ("a100-40gb-pcie", "a100-40gb-sxm", "a100-80gb-sxm", "a100-40gb-published"),
        (8, 0),
    ),
    **dict.fromkeys(("b200", "gb200"), (10, 0)),
    **dict.fromkeys(("b300", "gb300"), (10, 3)),
    **dict.fromkeys(("rtx5070ti", "rtx5080", "rtx5090", "rtx-pro-6000"), (12, 0)),
    "gb10": (12, 1),
}


def test_dry_run__every_preset_has_a_name_a_capability_and_a_workspace() -> None:
    for name in presets():
        machine = find_machine(f"{name}@1TB")
        assert machine.gpu is not None
        assert _device_name(machine) == machine.gpu.name
        # Hopper, and as on Hopper where the GPU is not of CUDA.
        capability = capability_of(_device_name(machine), machine.gpu)
        assert capability == CAPABILITIES.get(name, (9, 0))
        assert (workspace_bytes(capability) == 32 << 20) == (
            capability[0] in (9, 10, 12)
        )


def test_capability_of__a_name_alone_is_looked_up_and_any_other_counts_as_an_h100() -> (
    None
):
    assert capability_of("a10") == (8, 6)
    assert capability_of("dry run") == capability_of("a10", GpuCompute()) == (9, 0)
    assert _device_name(None) == "dry run"


def test_gpu__has_its_own_multiprocessors() -> None:
    counts = {
        name: FakedGpu(name, (8, 6)).multiprocessors.count
        for name in ("NVIDIA L4", "NVIDIA L40S", "rtx3090", "RTX 3060 Ti", "a10", "x")
    }
    assert list(counts.values()) == [58, 142, 82, 38, 72, 132]
