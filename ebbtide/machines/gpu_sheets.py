"""Data sheets of GPUs."""

from __future__ import annotations

from dataclasses import dataclass

from ebbtide.machines.gpu_compute import GpuCompute

_TERA = 1e12


@dataclass(frozen=True)
class GpuSheet:
    """A GPU as its data sheet describes it."""

    memory_gib: float  # Memory as torch reports it, GiB: less than the nominal size; drivers differ by up to 1 %.
    compute: GpuCompute  # Name, compute capability and peak rates.
    link: str  # Its link to the host: `pcie4x16`, `pcie5x16` or `nvlink-c2c`.
    source: str  # Title of the data sheet.


def _compute(
    name: str,
    capability: str | None,
    tflops: tuple[float, float, float, float | None],
    memory_gb_per_s: float,
    peer_gb_per_s: float,
) -> GpuCompute:
    """Return the peak rates of a GPU.

    Args:
        tflops: Dense peaks of fp32, tf32, fp16 and bf16 (accumulated in fp32), and fp8, in TFLOP/s; None: no fp8.
        memory_gb_per_s: Traffic with device memory, GB/s.
        peer_gb_per_s: Copies to the other GPUs in one direction, GB/s.
    """
    fp32, tf32, half, fp8 = tflops
    peaks = {"float32": fp32, "tf32": tf32, "float16": half, "bfloat16": half, "float8": fp8}
    return GpuCompute(
        name=name,
        compute_capability=capability,
        flops_per_s={key: value * _TERA for key, value in peaks.items() if value is not None},
        memory_bytes_per_s=memory_gb_per_s * 1e9,
        peer_bytes_per_s=peer_gb_per_s * 1e9,
    )


# Cards without NVLink reach their peers by PCIe; bridges, which are sold separately, are not counted.
_PCIE4_GB_PER_S, _PCIE5_GB_PER_S = 31.5, 63.0
_A100 = (19.5, 156.0, 312.0, None)
_HOPPER_SXM = (67.0, 494.5, 989.5, 1979.0)

GPU_SHEETS: dict[str, GpuSheet] = {
    "rtx3090": GpuSheet(
        23.69,
        _compute("NVIDIA GeForce RTX 3090", "8.6", (35.6, 35.6, 71.2, None), 936.0, _PCIE4_GB_PER_S),
        "pcie4x16",
        "NVIDIA Ampere GA102 GPU Architecture (whitepaper)",
    ),
    "rtx4090": GpuSheet(
        23.64,
        _compute("NVIDIA GeForce RTX 4090", "8.9", (82.6, 82.6, 165.2, 330.3), 1008.0, _PCIE4_GB_PER_S),
        "pcie4x16",
        "NVIDIA Ada GPU Architecture (whitepaper)",
    ),
    "rtx5090": GpuSheet(
        31.36,
        _compute("NVIDIA GeForce RTX 5090", "12.0", (104.8, 104.8, 209.5, 419.0), 1792.0, _PCIE5_GB_PER_S),
        "pcie5x16",
        "NVIDIA RTX Blackwell GPU Architecture (whitepaper)",
    ),
    "a10": GpuSheet(
        22.0,
        _compute("NVIDIA A10", "8.6", (31.2, 62.5, 125.0, None), 600.0, _PCIE4_GB_PER_S),
        "pcie4x16",
        "NVIDIA A10 Tensor Core GPU (data sheet)",
    ),
    "l40s": GpuSheet(
        44.42,
        _compute("NVIDIA L40S", "8.9", (91.6, 183.0, 362.05, 733.0), 864.0, _PCIE4_GB_PER_S),
        "pcie4x16",
        "NVIDIA L40S (data sheet)",
    ),
    "a100-40gb-pcie": GpuSheet(
        39.39,
        _compute("NVIDIA A100-PCIE-40GB", "8.0", _A100, 1555.0, _PCIE4_GB_PER_S),
        "pcie4x16",
        "NVIDIA A100 Tensor Core GPU (data sheet)",
    ),
    "a100-80gb-sxm": GpuSheet(
        79.25,
        _compute("NVIDIA A100-SXM4-80GB", "8.0", _A100, 2039.0, 300.0),
        "pcie4x16",
        "NVIDIA A100 Tensor Core GPU (data sheet)",
    ),
    "h100-80gb-pcie": GpuSheet(
        79.11,
        _compute("NVIDIA H100 PCIe", "9.0", (51.0, 378.0, 756.5, 1513.0), 2000.0, _PCIE5_GB_PER_S),
        "pcie5x16",
        "NVIDIA H100 Tensor Core GPU (data sheet)",
    ),
    "h100-80gb": GpuSheet(
        79.11,
        _compute("NVIDIA H100 80GB HBM3", "9.0", _HOPPER_SXM, 3350.0, 450.0),
        "pcie5x16",
        "NVIDIA H100 Tensor Core GPU (data sheet)",
    ),
    "h200": GpuSheet(
        139.8,
        _compute("NVIDIA H200", "9.0", _HOPPER_SXM, 4800.0, 450.0),
        "pcie5x16",
        "NVIDIA H200 Tensor Core GPU (data sheet)",
    ),
    "gh200": GpuSheet(
        94.5,
        _compute("NVIDIA GH200 480GB", "9.0", _HOPPER_SXM, 4000.0, 450.0),
        "nvlink-c2c",
        "NVIDIA GH200 Grace Hopper Superchip (data sheet), 96 GB of HBM3",
    ),
    # The data sheet says 8 TB/s; width and clock of the memory, as the driver reports them, give 7.67.
    "b200": GpuSheet(
        178.35,
        _compute("NVIDIA B200", "10.0", (80.0, 1100.0, 2250.0, 4500.0), 7670.0, 900.0),
        "pcie5x16",
        "NVIDIA Blackwell Architecture Technical Brief, HGX B200",
    ),
    # Seven links of 64 GB/s in each direction, one to each other GPU of the box.
    "mi300x": GpuSheet(
        191.98,
        _compute("AMD Instinct MI300X", None, (163.4, 653.7, 1307.4, 2614.9), 5300.0, 448.0),
        "pcie5x16",
        "AMD Instinct MI300X Accelerator (data sheet)",
    ),
}
