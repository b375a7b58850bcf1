"""Machines from data sheets: a GPU, a host, and the shares of their peaks that jobs reach."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ebbtide.errors import MachineError
from ebbtide.machines.accuracy import DATA_SHEETS, uncertainty_of
from ebbtide.machines.box import Box
from ebbtide.machines.gpu_sheets import GPU_SHEETS
from ebbtide.machines.host import Host, link_bytes_per_s, memory_rate, parse_host, slower_link
from ebbtide.machines.machine import Machine
from ebbtide.state_bytes import GRAD_BYTES, MASTER_BYTES, PARAM_BYTES, STATE_BYTES


class Estimate(NamedTuple):
    """An estimated quantity."""

    value: float  # The most likely value.
    factor: float  # The factor within which it is: one standard error, normal in the logarithm.


# The share of a data sheet's peak that jobs reach: docs/machines.md derives each value.
# Host memory under updates and copies: share of the peak of the channels. By kind, since memory on the package of the
# CPU reaches more.
HOST_MEMORY = {"ddr4": Estimate(0.6, 1.3), "ddr5": Estimate(0.6, 1.3), "lpddr5x": Estimate(0.75, 1.3)}
# Passes of the CPU over memory (update, cast, norm): share of the host memory rate.
CPU_PASS = Estimate(0.87, 1.3)
# What a core does at most, parameters/s, where memory is not the limit.
CORE_UPDATE_PARAMS_PER_S = 0.5e9
CORE_CAST_PARAMS_PER_S = 1.4e9
CORE_NORM_PARAMS_PER_S = 2.5e9
# Pinned copies: share of the link's peak by direction.
PCIE_H2D = PCIE_D2H = Estimate(0.8, 1.2)
C2C_H2D, C2C_D2H = Estimate(0.83, 1.2), Estimate(0.66, 1.2)
# Both directions at once: share of the sum.
DUPLEX = Estimate(0.85, 1.2)
# Pageable copies: one thread of the driver copies, bytes/s; to the device also at most this share of host memory.
PAGEABLE_H2D, PAGEABLE_D2H = Estimate(16e9, 2.0), Estimate(4e9, 3.0)
PAGEABLE_MEMORY_SHARE = 0.5
# Updates and casts on the GPU: share of the peak of its memory.
GPU_PASS = Estimate(0.8, 1.5)
STEP_OVERHEAD_S = Estimate(0.06, 2.0)
OPERATION_S = Estimate(1e-4, 3.0)


@dataclass(frozen=True)
class HostSheet:
    """A host and where it is described."""

    cpu: str  # Its CPUs and the source of its description.
    host: Host  # Its parts.


def _sheet(cpu: str, spec: str) -> HostSheet:
    return HostSheet(cpu, parse_host(spec))


_EPYC_7543P = _sheet(
    "AMD EPYC 7543P, as in the nodes of ALCF Polaris", "ddr4-3200-8ch,32-cores,pcie4x16,512GiB,4-ranks"
)
_EPYC_9354 = _sheet("2 AMD EPYC 9354 (data sheet)", "ddr5-4800-24ch,64-cores,2-sockets,pcie5x16,768GiB,4-ranks")
_DGX_H100 = _sheet(
    "2 Intel Xeon Platinum 8480C, as in the NVIDIA DGX H100 and H200 (data sheets)",
    "ddr5-4800-16ch,112-cores,2-sockets,pcie5x16,2TiB,8-ranks",
)

DEFAULT_HOSTS: dict[str, HostSheet] = {
    "rtx3090": _sheet("AMD Ryzen 9 5950X (data sheet)", "ddr4-3200-2ch,16-cores,pcie4x16,128GiB,1-rank"),
    "rtx4090": _sheet("AMD Ryzen 9 7950X (data sheet)", "ddr5-5200-2ch,16-cores,pcie5x16,128GiB,1-rank"),
    "rtx5090": _sheet("AMD Ryzen 9 9950X (data sheet)", "ddr5-5600-2ch,16-cores,pcie5x16,192GiB,1-rank"),
    "a10": _EPYC_7543P,
    "l40s": _EPYC_9354,
    "a100-40gb-pcie": _EPYC_7543P,
    "a100-80gb-sxm": _sheet(
        "2 AMD EPYC 7742, as in the NVIDIA DGX A100 (data sheet)",
        "ddr4-3200-16ch,128-cores,2-sockets,pcie4x16,2TiB,8-ranks",
    ),
    "h100-80gb-pcie": _EPYC_9354,
    "h100-80gb": _DGX_H100,
    "h200": _DGX_H100,
    "gh200": _sheet(
        "NVIDIA Grace of the GH200 Grace Hopper Superchip (data sheet)",
        "lpddr5x-512GB/s,72-cores,nvlink-c2c,480GB,1-rank",
    ),
    "b200": _sheet(
        "2 Intel Xeon Platinum 8570, as in the NVIDIA DGX B200 (data sheet)",
        "ddr5-5600-16ch,112-cores,2-sockets,pcie5x16,2TiB,8-ranks",
    ),
    "mi300x": _sheet(
        "2 AMD EPYC 9374F, as in AMD's MLPerf Inference 4.1 system 8xMI300X_2xEPYC-9374F",
        "ddr5-4800-24ch,64-cores,2-sockets,pcie5x16,1536GiB,8-ranks",
    ),
}


_DATE = "2026-11-22"
_FP32_GRAD_BYTES = 4
_CAST_BYTES = MASTER_BYTES + PARAM_BYTES
# State read and written, gradient read, parameter written.
_CPU_UPDATE_BYTES = 2 * STATE_BYTES + GRAD_BYTES + PARAM_BYTES
# The same, and the casts of gradient and parameter, which are kernels of their own: as `ebbtide calibrate` measures it.
_GPU_UPDATE_BYTES = 2 * STATE_BYTES + (GRAD_BYTES + 2 * _FP32_GRAD_BYTES) + _CAST_BYTES
# Keys of the file that say where the rates of a machine come from.
_PROVENANCE = ("fit", "measured", "source", "uncertainty", "notes", "contention", "cpu_update", "numa", "ranks")


def data_sheet_machine(name: str) -> Machine:
    """Return the machine of a GPU by its name in `GPU_SHEETS`, in its default host.

    Raises:
        KeyError: There is no such GPU.
    """
    gpu, sheet = GPU_SHEETS[name], DEFAULT_HOSTS[name]
    peak_bytes_per_s = gpu.compute.memory_bytes_per_s or 0.0
    pass_bytes_per_s = GPU_PASS.value * peak_bytes_per_s
    machine = Machine(
        name=name,
        gpu_memory_bytes=float(round(gpu.memory_gib * 2**30)),
        gpu_update_params_per_s=pass_bytes_per_s / _GPU_UPDATE_BYTES,
        gpu_cast_params_per_s=pass_bytes_per_s / _CAST_BYTES,
        step_overhead_s=STEP_OVERHEAD_S.value,
        operation_s=OPERATION_S.value,
        gpu=gpu.compute,
        extra={
            "gpu_link": gpu.link,
            "uncertainty": {
                "gpu_update_params_per_s": GPU_PASS.factor,
                "gpu_cast_params_per_s": GPU_PASS.factor,
                "step_overhead_s": STEP_OVERHEAD_S.factor,
                "operation_s": OPERATION_S.factor,
            },
        },
    )
    return _in_host(machine, name, sheet, gpu.source)


def with_host(machine: Machine, spec: str) -> Machine:
    """Return a machine with its GPU in another host.

    Rates of the host and of the link are those of data sheets; those of the GPU stay. Parts that the host does not
    state are those of the machine's own host, where its file has one (`host`). `spec` is the host, such as
    `ddr5-2ch,16-cores,pcie4x16,256GB`.

    Raises:
        MachineError: The host cannot be parsed, the GPU does not have its link, or a part is not stated anywhere.
    """
    own = machine.extra.get("host")
    own_spec = own.get("spec") if isinstance(own, dict) else None
    base = parse_host(own_spec) if isinstance(own_spec, str) else Host()
    if base.ranks is None:
        base = replace(base, ranks=machine.box.ranks if machine.box is not None else 1)
    host = parse_host(spec).over(base)
    missing = [
        text
        for key, text in (
            ("memory", "memory (ddr5-2ch)"),
            ("cores", "cores (16-cores)"),
            ("link", "the link (pcie4x16)"),
            ("memory_bytes", "the size of memory (256GB)"),
        )
        if getattr(host, key) is None
    ]
    if missing:
        raise MachineError(f"host {spec!r:.80}: {machine.name} has no stated host; write also {', '.join(missing)}")
    kept = {key: value for key, value in uncertainty_of(machine).items() if key in _GPU_KEYS}
    extra = {key: value for key, value in machine.extra.items() if key not in _PROVENANCE}
    base_machine = replace(machine, box=None, extra={**extra, "uncertainty": kept})
    gpu_source = _object(machine.extra, "source").get("data", "the machine file")
    return _in_host(base_machine, f"{machine.name}@{spec}", HostSheet("as stated", host), str(gpu_source))


# Rates that do not depend on the host.
_GPU_KEYS = ("gpu_update_params_per_s", "gpu_cast_params_per_s", "step_overhead_s", "operation_s")


def _in_host(machine: Machine, name: str, sheet: HostSheet, gpu_source: str) -> Machine:
    """Return a machine with the rates of a host, whose parts are all stated."""
    host = sheet.host
    assert host.memory is not None
    assert host.memory_bytes is not None
    assert host.cores is not None
    assert host.link is not None
    ranks, sockets = host.ranks or 1, host.sockets or 1
    gpu_link = machine.extra.get("gpu_link", host.link)
    link = slower_link(gpu_link, host.link) if isinstance(gpu_link, str) else host.link
    kind, memory_peak = memory_rate(host.memory)
    memory = HOST_MEMORY[kind]
    total_bytes_per_s = memory.value * memory_peak
    rank_bytes_per_s, rank_cores = total_bytes_per_s / ranks, host.cores / ranks
    # A rank alone stays on its socket.
    alone_bytes_per_s, alone_cores = max(
        (total_bytes_per_s / sockets, host.cores / sockets), (rank_bytes_per_s, rank_cores)
    )
    h2d, d2h = (C2C_H2D, C2C_D2H) if link == "nvlink-c2c" else (PCIE_H2D, PCIE_D2H)
    peak = link_bytes_per_s(link)
    # Both shares err, independently.
    cpu_factor = round(math.exp(math.hypot(math.log(memory.factor), math.log(CPU_PASS.factor))), 3)
    h2d_bytes_per_s, d2h_bytes_per_s = h2d.value * peak, d2h.value * peak
    update = _cpu_update(rank_bytes_per_s, rank_cores)
    pass_bytes_per_s = CPU_PASS.value * rank_bytes_per_s
    return replace(
        machine,
        name=name,
        host_memory_bytes=host.memory_bytes / ranks,
        pinned_memory_bytes=None,
        h2d_bytes_per_s=h2d_bytes_per_s,
        d2h_bytes_per_s=d2h_bytes_per_s,
        duplex_bytes_per_s=DUPLEX.value * (h2d_bytes_per_s + d2h_bytes_per_s),
        h2d_pageable_bytes_per_s=min(PAGEABLE_H2D.value, PAGEABLE_MEMORY_SHARE * rank_bytes_per_s, h2d_bytes_per_s),
        d2h_pageable_bytes_per_s=min(PAGEABLE_D2H.value, d2h_bytes_per_s),
        host_memory_bytes_per_s=rank_bytes_per_s,
        cpu_update_params_per_s=update,
        cpu_cast_params_per_s=min(pass_bytes_per_s / _CAST_BYTES, CORE_CAST_PARAMS_PER_S * rank_cores),
        cpu_norm_params_per_s=min(pass_bytes_per_s / GRAD_BYTES, CORE_NORM_PARAMS_PER_S * rank_cores),
        box=Box(
            ranks,
            cpu_update_params_per_s=ranks * update,
            host_memory_bytes_per_s=total_bytes_per_s,
            one_rank_cpu_update_params_per_s=_cpu_update(alone_bytes_per_s, alone_cores),
            one_rank_host_memory_bytes_per_s=alone_bytes_per_s,
        ),
        extra={
            **machine.extra,
            "host": {"cpu": sheet.cpu, "spec": host.spec},
            "source": {
                "kind": DATA_SHEETS,
                "data": f"GPU: {gpu_source}; host: {sheet.cpu}",
                "how": "peaks of data sheets times the shares that jobs reach (docs/machines.md); nothing was measured",
                "date": _DATE,
            },
            "uncertainty": {
                **_object(machine.extra, "uncertainty"),
                "h2d_bytes_per_s": h2d.factor,
                "d2h_bytes_per_s": d2h.factor,
                "duplex_bytes_per_s": DUPLEX.factor,
                "h2d_pageable_bytes_per_s": PAGEABLE_H2D.factor,
                "d2h_pageable_bytes_per_s": PAGEABLE_D2H.factor,
                "host_memory_bytes_per_s": memory.factor,
                "cpu_update_params_per_s": cpu_factor,
                "cpu_cast_params_per_s": cpu_factor,
                "cpu_norm_params_per_s": cpu_factor,
            },
        },
    )


def _cpu_update(memory_bytes_per_s: float, cores: float) -> float:
    """Return the parameters that some cores update per second: what memory or what the cores allow."""
    by_memory = CPU_PASS.value * memory_bytes_per_s / _CPU_UPDATE_BYTES
    return min(by_memory, CORE_UPDATE_PARAMS_PER_S * cores)


def _object(values: dict[str, Any], key: str) -> dict[str, Any]:
    value = values.get(key)
    return value if isinstance(value, dict) else {}
