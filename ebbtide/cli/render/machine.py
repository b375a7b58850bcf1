"""Prints the rates of a machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ebbtide.cli.render.tables import print_table
from ebbtide.units import bytes_text, ms_text, rate_text

if TYPE_CHECKING:
    from ebbtide.machines.box import Box
    from ebbtide.machines.gpu_compute import GpuCompute
    from ebbtide.machines.machine import Machine


def _params_rate_text(params_per_s: float | None) -> str:
    return "-" if params_per_s is None else f"{params_per_s / 1e9:.3g} G parameters/s"


def _seconds_text(seconds: float | None) -> str:
    return ms_text(None if seconds is None else seconds * 1e3)


def _share_text(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} % of the rate in place"


def _ratio_text(ratio: float | None) -> str:
    return "-" if ratio is None else f"{100 * ratio:.0f} % of the rate with fp32 masters"


# Key in a machine file -> (label, function that formats the value).
_RATES: dict[str, tuple[str, Callable[[float | None], str]]] = {
    "gpu_memory_bytes": ("GPU memory", bytes_text),
    "host_memory_bytes": ("host memory", bytes_text),
    "host_memory_bytes_per_s": ("host memory, read and written", rate_text),
    "h2d_bytes_per_s": ("h2d, pinned", rate_text),
    "d2h_bytes_per_s": ("d2h, pinned", rate_text),
    "duplex_bytes_per_s": ("both directions together", rate_text),
    "h2d_pageable_bytes_per_s": ("h2d, pageable", rate_text),
    "d2h_pageable_bytes_per_s": ("d2h, pageable", rate_text),
    "cpu_update_params_per_s": ("update on the CPU", _params_rate_text),
    "cpu_out_of_place_share": ("update on the CPU, out of place", _share_text),
    "cpu_remainder_ratio": ("update on the CPU, masters as remainders", _ratio_text),
    "cpu_cast_params_per_s": ("cast on the CPU", _params_rate_text),
    "cpu_norm_params_per_s": ("norm of gradients on the CPU", _params_rate_text),
    "gpu_update_params_per_s": ("update on the GPU", _params_rate_text),
    "gpu_cast_params_per_s": ("cast on the GPU", _params_rate_text),
    "step_overhead_s": ("overhead of a step", _seconds_text),
    "operation_s": ("overhead of an operation", _seconds_text),
}


def print_machine(machine: Machine) -> None:
    """Print all rates with their source, and for a fitted machine how well it explains the traces."""
    rows = []
    for key, (label, text) in _RATES.items():
        value = getattr(machine, key)
        rows.append([label, text(value), "not known" if value is None else _source(machine, key)])
    ranks = f" while {machine.box.ranks} update on its host" if machine.box is not None else ""
    print_table(f"{machine.name}, rates of one rank{ranks}", ["", "rate", "source"], rows)
    if machine.box is not None:
        _print_box(machine, machine.box)
    if machine.gpu is not None:
        _print_gpu(machine, machine.gpu)
    if machine.storage:
        _print_storage(machine)
    fit = machine.extra.get("fit")
    if fit is not None:
        print_table(
            "Errors of the fit",
            ["trace", "ranks on the host", "policy", "update, fitted vs. measured"],
            [
                [name, str(fit["ranks"][name] or "not known"), fit["policies"][name], f"{100 * residual:+.1f} %"]
                for name, residual in fit["residuals"].items()
            ],
        )


def _print_box(machine: Machine, box: Box) -> None:
    """Print the totals of the box, and the rates of a rank alone where they are known."""
    rows = []
    for key in ("cpu_update_params_per_s", "host_memory_bytes_per_s"):
        label, text = _RATES[key]
        rows.append([label, text(getattr(box, key)), text(getattr(box, f"one_rank_{key}"))])
    print_table(f"{machine.name}, the box", ["", f"total of {box.ranks} ranks", "one rank, the others idle"], rows)


def _print_gpu(machine: Machine, gpu: GpuCompute) -> None:
    rows = [[f"products in {precision}", f"{flops / 1e12:.4g} TFLOP/s"] for precision, flops in gpu.flops_per_s.items()]
    if gpu.memory_bytes_per_s is not None:
        rows.append(["device memory, read and written", f"{gpu.memory_bytes_per_s / 1e12:.4g} TB/s"])
    capability = f", compute capability {gpu.compute_capability}" if gpu.compute_capability else ""
    print_table(f"{machine.name}, the GPU: {gpu.name or 'not known'}{capability}", ["", "rate"], rows)


def _print_storage(machine: Machine) -> None:
    rows = [
        [
            path.path or f"path {number}",
            rate_text(path.read_bytes_per_s),
            rate_text(path.write_bytes_per_s),
            rate_text(path.duplex_bytes_per_s),
            bytes_text(path.bytes),
        ]
        for number, path in enumerate(machine.storage)
    ]
    columns = ["folder", "read", "written", "both together", "free"]
    print_table(f"{machine.name}, storage", columns, rows)


def _source(machine: Machine, key: str) -> str:
    fit = machine.extra.get("fit")
    if fit is None:
        return f"measured: {machine.extra['measured'][key]['how']}"
    if key not in fit["uncertainty"]:
        return "recorded in the traces"
    factor = f"x{fit['uncertainty'][key]:.2f}"
    if key in fit["unidentified"]:
        return f"prior, {factor}: not determined by these traces"
    return f"fitted, {factor}"
