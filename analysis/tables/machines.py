"""The table of machines that come with ebbtide."""

from __future__ import annotations

from collections.abc import Sequence

from ebbtide.analysis.tables.table import Column, Table, View, number, params_rate, rate, size, text
from ebbtide.machines.accuracy import accuracy_of
from ebbtide.machines.machine import Machine


def catalog_view(machines: Sequence[Machine], with_sources: bool) -> View:
    """Return machines with their rates and how far to trust these, and where the rates come from."""
    columns: list[Column] = [
        text("machine", "name"),
        size("memory", "gpu_memory_bytes"),
        rate("h2d", "h2d_bytes_per_s"),
        rate("host", "host_memory_bytes_per_s"),
        params_rate("CPU", "cpu_update_params_per_s"),
        params_rate("GPU", "gpu_update_params_per_s"),
        number("ranks", lambda machine: machine.box.ranks if machine.box else None),
        text("trust", lambda machine: accuracy_of(machine).short_text()),
    ]
    note = (
        "For one rank while all ranks of the host update: GPU memory, copies to the GPU, traffic with host memory, "
        "1e9 parameters updated a second on CPU and GPU. Trust: the largest error of an update on the runs that a "
        "machine was fitted to, or the factor within which the rate of the CPU is known from data sheets."
    )
    yield Table("machines", "Machines by name", columns, machines, note=note, max_rows=None)
    for machine in machines if with_sources else ():
        source = machine.extra["source"]
        yield ""
        yield f"{machine.name}: {source['data']}"
        yield f"  {source['how']} ({source['date']})"
        yield f"  host: {machine.extra['host']['spec']}"
        for remark in source.get("notes", ()):
            yield f"  note: {remark}"
    if not with_sources:
        yield "next: ebbtide machines NAME (sources, and what tells machines of one card apart)"
