"""The tables of a machine that was measured or fitted."""

from operator import itemgetter
from typing import NamedTuple

from ebbtide.analysis.tables.table import Column, Table, View, rate, size, text
from ebbtide.machines.machine import SHARED_RATES, Machine
from ebbtide.units import NOT_KNOWN


class _Rate(NamedTuple):
    """A rate of a machine file: its label, and the size and name of its unit."""

    label: str
    scale: float
    unit: str


_GB, _PARAMS = (1e9, "GB/s"), (1e9, "G params/s")
_RATES = {
    "gpu_memory_bytes": _Rate("GPU memory", 2**30, "GiB"),
    "host_memory_bytes": _Rate("host memory", 2**30, "GiB"),
    "host_memory_bytes_per_s": _Rate("host memory, read and written", *_GB),
    "h2d_bytes_per_s": _Rate("h2d, pinned", *_GB),
    "d2h_bytes_per_s": _Rate("d2h, pinned", *_GB),
    "duplex_bytes_per_s": _Rate("both directions together", *_GB),
    "h2d_pageable_bytes_per_s": _Rate("h2d, pageable", *_GB),
    "d2h_pageable_bytes_per_s": _Rate("d2h, pageable", *_GB),
    "cpu_update_params_per_s": _Rate("update on the CPU", *_PARAMS),
    "cpu_out_of_place_share": _Rate("update out of place, to in place", 0.01, "%"),
    "cpu_remainder_ratio": _Rate("update of remainders, to fp32 masters", 0.01, "%"),
    "cpu_cast_params_per_s": _Rate("cast on the CPU", *_PARAMS),
    "cpu_norm_params_per_s": _Rate("norm of gradients on the CPU", *_PARAMS),
    "gpu_update_params_per_s": _Rate("update on the GPU", *_PARAMS),
    "gpu_cast_params_per_s": _Rate("cast on the GPU", *_PARAMS),
    "step_overhead_s": _Rate("overhead of a step", 1e-3, "ms"),
    "operation_s": _Rate("overhead of an operation", 1e-3, "ms"),
}


def machine_view(machine: Machine, verbose: bool = True) -> View:
    """Return the known rates.

    With `verbose`, return also how each was measured, the box, the GPU, and the errors
    of a fit.
    """
    ranks = (
        f" while {machine.box.ranks} update on its host"
        if machine.box is not None
        else ""
    )
    with_rate = [key for key in _RATES if getattr(machine, key) is not None]
    columns: list[Column] = [
        text("figure", lambda key: _RATES[key].label),
        text("rate", lambda key: _value(key, getattr(machine, key))),
        text("unit", lambda key: _RATES[key].unit),
        text("source", lambda key: _source(machine, key, verbose)),
    ]
    yield Table(
        "rates", f"{machine.name}, rates of one rank{ranks}", columns, with_rate
    )
    if missing := [_RATES[key].label for key in _RATES if key not in with_rate]:
        yield f"not known: {'; '.join(missing)}"
    columns = [
        text("folder", lambda entry: entry[1].path or f"path {entry[0]}"),
        rate("read", lambda entry: entry[1].read_bytes_per_s),
        rate("written", lambda entry: entry[1].write_bytes_per_s),
        rate("both together", lambda entry: entry[1].duplex_bytes_per_s),
        size("free", lambda entry: entry[1].bytes),
    ]
    yield Table(
        "storage", f"{machine.name}, storage", columns, list(enumerate(machine.storage))
    )
    if verbose:
        yield from _details(machine)


def _details(machine: Machine) -> View:
    if (box := machine.box) is not None:
        columns: list[Column] = [
            text("figure", lambda key: _RATES[key].label),
            text(
                f"total of {box.ranks} ranks",
                lambda key: _value(key, getattr(box, key)),
            ),
            text(
                "one rank, the others idle",
                lambda key: _value(key, getattr(box, f"one_rank_{key}")),
            ),
            text("unit", lambda key: _RATES[key].unit),
        ]
        yield Table("box", f"{machine.name}, the box", columns, SHARED_RATES)
    if (gpu := machine.gpu) is not None:
        rows = [
            (f"products in {kind}", f"{flops / 1e12:.4g}", "TFLOP/s")
            for kind, flops in gpu.flops_per_s.items()
        ]
        if gpu.memory_bytes_per_s is not None:
            rows.append(
                (
                    "device memory, read and written",
                    f"{gpu.memory_bytes_per_s / 1e9:,.0f}",
                    "GB/s",
                )
            )
        capability = (
            f", compute capability {gpu.compute_capability}"
            if gpu.compute_capability
            else ""
        )
        title = f"{machine.name}, the GPU: {gpu.name or NOT_KNOWN}{capability}"
        cells = (
            text(label, itemgetter(number))
            for number, label in enumerate(("figure", "rate", "unit"))
        )
        yield Table("gpu", title, tuple(cells), rows)
    fit = machine.extra.get("fit") or {"residuals": {}}
    columns = [
        text("trace", lambda name: name),
        text("ranks on the host", lambda name: str(fit["ranks"][name] or NOT_KNOWN)),
        text("policy", lambda name: fit["policies"][name]),
        text(
            "update, fitted vs. measured",
            lambda name: f"{100 * fit['residuals'][name]:+.1f} %",
        ),
    ]
    yield Table(
        "fit", "Errors of the fit", columns, list(fit["residuals"]), max_rows=None
    )


def _value(key: str, value: float | None) -> str | None:
    return None if value is None else f"{value / _RATES[key].scale:,.3g}"


def _source(machine: Machine, key: str, verbose: bool) -> str:
    fit = machine.extra.get("fit")
    if fit is None:
        return (
            f"measured: {machine.extra['measured'][key]['how']}"
            if verbose
            else "measured"
        )
    if key not in fit["uncertainty"]:
        return "recorded in the traces"
    factor = f"x{fit['uncertainty'][key]:.2f}"
    if key in fit["unidentified"]:
        return (
            f"prior, {factor}: not determined by these traces"
            if verbose
            else f"prior, {factor}"
        )
    return f"fitted, {factor}"
