"""Machines from data sheets: a GPU, a host, and the shares of their peaks that jobs
reach."""

import math
from dataclasses import replace
from typing import Any

from ebbtide.errors import MachineError
from ebbtide.json_files import section
from ebbtide.machines.accuracy import DATA_SHEETS, uncertainty_of
from ebbtide.machines.host import (
    UNIFIED,
    Host,
    link_bytes_per_s,
    memory_rate,
    network_bytes_per_s,
    parse_host,
    slower_link,
)
from ebbtide.machines.machine import Box, Machine
from ebbtide.machines.sheets import (
    DEFAULT_HOSTS,
    GPU_SHEETS,
    SHARES,
    FigureSource,
    GpuSheet,
    HostSheet,
    Share,
    preset_of,
    system_memory_text,
)
from ebbtide.state_bytes import GRAD_BYTES, MASTER_BYTES, PARAM_BYTES, STATE_BYTES

_FP32_GRAD_BYTES = 4
_CAST_BYTES = MASTER_BYTES + PARAM_BYTES
# State read and written, gradient read, parameter written.
_CPU_UPDATE_BYTES = 2 * STATE_BYTES + GRAD_BYTES + PARAM_BYTES
# The same, and the casts of gradient and parameter, which are kernels of their own: as
# `ebbtide calibrate` measures it.
_GPU_UPDATE_BYTES = 2 * STATE_BYTES + (GRAD_BYTES + 2 * _FP32_GRAD_BYTES) + _CAST_BYTES
# Keys of the file that say where the rates of a machine come from.
_PROVENANCE = (
    "fit",
    "measured",
    "source",
    "uncertainty",
    "notes",
    "contention",
    "cpu_update",
    "numa",
    "ranks",
)


def data_sheet_machine(name: str) -> Machine:
    """Return the machine of a GPU by its name in `GPU_SHEETS`, in its default host."""
    gpu, gpu_pass = GPU_SHEETS[name], SHARES["gpu_pass"]
    memory = gpu.sources["gpu.memory_bytes_per_s"]
    pass_bytes_per_s = gpu_pass.value * (gpu.compute.memory_bytes_per_s or 0.0)
    times = {key: SHARES[key] for key in ("step_overhead_s", "operation_s")}
    passes = dict.fromkeys(
        ("gpu_update_params_per_s", "gpu_cast_params_per_s"), gpu_pass
    )
    figures = gpu.sources | {key: _of_peak(gpu_pass, memory) for key in passes}
    machine = Machine(
        name=name,
        gpu_memory_bytes=float(round((gpu.memory_gib - gpu.system_gib) * 2**30)),
        gpu_update_params_per_s=pass_bytes_per_s / _GPU_UPDATE_BYTES,
        gpu_cast_params_per_s=pass_bytes_per_s / _CAST_BYTES,
        **{key: share.value for key, share in times.items()},  # type: ignore[arg-type]
        gpu=gpu.compute,
        extra={
            "gpu_link": gpu.link,
            "price": _price(gpu),
            "shared_memory": system_memory_text(gpu) if gpu.system_gib else None,
            "source": {
                "figures": _as_json(
                    figures | {key: share.source for key, share in times.items()}
                )
            },
            "uncertainty": {
                key: share.factor for key, share in (passes | times).items()
            },
        },
    )
    return _in_host(
        machine,
        name,
        DEFAULT_HOSTS[name],
        gpu.sources["gpu.flops_per_s.bfloat16"].title,
    )


def _price(gpu: GpuSheet) -> dict[str, Any] | None:
    if gpu.price_usd is None or gpu.price_source is None:
        return None
    return {
        "usd": gpu.price_usd,
        "source": gpu.price_source.title,
        "date": gpu.price_source.date,
    }


def whole_memory_bytes(machine: Machine) -> float | None:
    """Return the memory of a machine's GPU with what the system takes of it, where GPU
    and CPU share it; None: not known."""
    sheet, size = preset_of(machine.gpu_name), machine.gpu_memory_bytes
    if size is None or sheet is None or not machine.extra.get("shared_memory"):
        return size
    return size + 2**30 * sheet.system_gib


def with_host(machine: Machine, spec: str) -> Machine:
    """Return a machine with its GPU, and the GPU's rates, in another host.

    Its host is such as `ddr5-2ch,16-cores,pcie4x16,256GB`, with the rates of data
    sheets. Parts not stated are those of its own host. Raises MachineError where the
    host cannot be parsed, the GPU does not have its link, or a part is not stated
    anywhere.
    """
    own_spec = section(machine.extra, "host").get("spec")
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
        raise MachineError(
            f"host {spec!r:.80}: {machine.name} has no stated host; write also "
            f"{', '.join(missing)}"
        )
    kept = {
        key: value for key, value in uncertainty_of(machine).items() if key in _GPU_KEYS
    }
    source = section(machine.extra, "source")
    figures = {
        key: figure
        for key, figure in section(source, "figures").items()
        if key in _GPU_KEYS or key.startswith(("gpu.", "gpu_memory"))
    }
    extra = {
        key: value for key, value in machine.extra.items() if key not in _PROVENANCE
    }
    extra |= {"uncertainty": kept, "source": {"figures": figures}}
    stated = HostSheet(
        "as stated",
        host,
        FigureSource("the host as stated", SHARES["cpu_pass"].source.date),
    )
    base_machine = replace(machine, box=None, extra=extra)
    return _in_host(
        base_machine,
        f"{machine.name}@{spec}",
        stated,
        str(source.get("data", "the machine file")),
    )


# Rates that do not depend on the host.
_GPU_KEYS = (
    "gpu_update_params_per_s",
    "gpu_cast_params_per_s",
    "step_overhead_s",
    "operation_s",
)


def _in_host(machine: Machine, name: str, sheet: HostSheet, gpu_source: str) -> Machine:
    """Return a machine with the rates of a host, whose parts are all stated."""
    host, origin = sheet.host, sheet.source
    assert host.memory is not None
    assert host.memory_bytes is not None
    assert host.cores is not None
    assert host.link is not None
    ranks, sockets = host.ranks or 1, host.sockets or 1
    gpu_link = machine.extra.get("gpu_link", host.link)
    link = slower_link(gpu_link, host.link) if isinstance(gpu_link, str) else host.link
    kind, memory_peak = memory_rate(host.memory)
    memory, cpu_pass, duplex = SHARES[kind], SHARES["cpu_pass"], SHARES["duplex"]
    h2d_pageable, d2h_pageable = (
        SHARES["h2d_pageable_bytes_per_s"],
        SHARES["d2h_pageable_bytes_per_s"],
    )
    total_bytes_per_s = memory.value * memory_peak
    rank_bytes_per_s, rank_cores = total_bytes_per_s / ranks, host.cores / ranks
    # A rank alone stays on its socket.
    alone_bytes_per_s, alone_cores = max(
        (total_bytes_per_s / sockets, host.cores / sockets),
        (rank_bytes_per_s, rank_cores),
    )
    h2d, d2h = _link_rates(machine, link, memory_peak / ranks, origin)
    # Both shares err, independently.
    cpu_factor = round(
        math.exp(math.hypot(math.log(memory.factor), math.log(cpu_pass.factor))), 3
    )
    update = _cpu_update(rank_bytes_per_s, rank_cores)
    pass_bytes_per_s = cpu_pass.value * rank_bytes_per_s
    memory_source = _of_peak(memory, origin)
    pass_source = cpu_pass.source._replace(
        title=f"{cpu_pass.value:g} of the host memory rate, {cpu_pass.source.title}"
    )
    on_cpu = {
        "cpu_update_params_per_s": update,
        "cpu_cast_params_per_s": min(
            pass_bytes_per_s / _CAST_BYTES, _of_cores("core_cast", rank_cores)
        ),
        "cpu_norm_params_per_s": min(
            pass_bytes_per_s / GRAD_BYTES, _of_cores("core_norm", rank_cores)
        ),
    }
    to_device = min(
        h2d_pageable.value,
        SHARES["pageable_memory"].value * rank_bytes_per_s,
        h2d.value,
    )
    rates = {
        "h2d_bytes_per_s": h2d,
        "d2h_bytes_per_s": d2h,
        "duplex_bytes_per_s": duplex._replace(
            value=duplex.value * (h2d.value + d2h.value)
        ),
        "h2d_pageable_bytes_per_s": h2d_pageable._replace(value=to_device),
        "d2h_pageable_bytes_per_s": d2h_pageable._replace(
            value=min(d2h_pageable.value, d2h.value)
        ),
        "host_memory_bytes_per_s": Share(
            rank_bytes_per_s, memory.factor, memory_source
        ),
        **{key: Share(rate, cpu_factor, pass_source) for key, rate in on_cpu.items()},
    }
    figures = _as_json(
        {key: rate.source for key, rate in rates.items()}
        | {"host_memory_bytes": origin}
    )
    return replace(
        machine,
        name=name,
        host_memory_bytes=host.memory_bytes / ranks,
        pinned_memory_bytes=None,
        unified_memory=link == UNIFIED,
        **{key: rate.value for key, rate in rates.items()},  # type: ignore[arg-type]
        box=Box(
            ranks,
            cpu_update_params_per_s=ranks * update,
            host_memory_bytes_per_s=total_bytes_per_s,
            one_rank_cpu_update_params_per_s=_cpu_update(
                alone_bytes_per_s, alone_cores
            ),
            one_rank_host_memory_bytes_per_s=alone_bytes_per_s,
            network_bytes_per_s=(
                network_bytes_per_s(host.network) if host.network else None
            ),
        ),
        extra={
            **machine.extra,
            "host": {"cpu": sheet.cpu, "spec": host.spec},
            "source": {
                "kind": DATA_SHEETS,
                "data": f"GPU: {gpu_source}; host: {sheet.cpu}",
                "how": (
                    "peaks of data sheets times the shares that jobs reach "
                    "(docs/machines.md), and published "
                    "measurements where a figure's source names one; nothing was "
                    "measured "
                    "here"
                ),
                "date": max(figure["date"] for figure in figures.values()),
                "figures": section(section(machine.extra, "source"), "figures")
                | figures,
            },
            "uncertainty": section(machine.extra, "uncertainty")
            | {key: rate.factor for key, rate in rates.items()},
        },
    )


def _link_rates(
    machine: Machine, link: str, memory_peak: float, host: FigureSource
) -> tuple[Share, Share]:
    """Return the rates of pinned copies to the device and to the host: measured ones of
    the GPU, or a share of a peak.

    `memory_peak` is the peak of a rank, bytes/s: where GPU and CPU share the memory, a
    copy reads and writes it.
    """
    name = machine.gpu.name if machine.gpu is not None else None
    measured = next(
        (sheet.c2c for sheet in GPU_SHEETS.values() if sheet.compute.name == name), None
    )
    if link == UNIFIED:
        share, peak = SHARES["unified"], memory_peak / 2
    else:
        if link == "nvlink-c2c" and measured is not None:
            return measured
        share, peak = (
            SHARES["c2c" if link == "nvlink-c2c" else "pcie"],
            link_bytes_per_s(link),
        )
    rate = share._replace(value=share.value * peak, source=_of_peak(share, host))
    return rate, rate


def _of_peak(share: Share, peak: FigureSource) -> FigureSource:
    """Return the source of a rate that is a share of a peak."""
    title = f"{share.value:g} of the peak, {share.source.title}; peak: {peak.title}"
    return FigureSource(title, max(share.source.date, peak.date))


def _as_json(sources: dict[str, FigureSource]) -> dict[str, dict[str, str]]:
    return {
        key: {"source": source.title, "date": source.date}
        for key, source in sources.items()
    }


def _cpu_update(memory_bytes_per_s: float, cores: float) -> float:
    """Return the parameters that some cores update per second, limited by memory or by
    the cores."""
    by_memory = SHARES["cpu_pass"].value * memory_bytes_per_s / _CPU_UPDATE_BYTES
    return min(by_memory, _of_cores("core_update", cores))


def _of_cores(name: str, cores: float) -> float:
    return SHARES[f"{name}_params_per_s"].value * cores
