"""The machines that come with ebbtide, and the lookup of a machine by name or file."""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path
from typing import Any

from ebbtide.errors import MachineError
from ebbtide.machines.data_sheets import data_sheet_machine, with_host
from ebbtide.machines.gpu_sheets import GPU_SHEETS
from ebbtide.machines.machine import Machine, load_machine, machine_from


def presets() -> list[str]:
    """Return the names of the machines that come with ebbtide: fitted ones, and data sheets of GPUs in a host."""
    return sorted([*_fitted(), *GPU_SHEETS])


def preset(name: str) -> Machine:
    """Load a machine that comes with ebbtide. Raises MachineError where `name` is not among `presets()`."""
    if name in GPU_SHEETS:
        return data_sheet_machine(name)
    if name not in _fitted():
        raise MachineError(f"there is no machine {name!r}: name a file, or one of {', '.join(presets())}")
    with resources.as_file(resources.files("ebbtide.machines").joinpath("presets", f"{name}.json")) as path:
        return load_machine(path)


def _fitted() -> list[str]:
    files = resources.files("ebbtide.machines").joinpath("presets").iterdir()
    return [file.name.removesuffix(".json") for file in files if file.name.endswith(".json")]


def find_machine(
    name_or_path: str | None, recorded: dict[str, Any] | None = None, recorded_in: str = "the trace"
) -> Machine:
    """Return a machine by file or by the name of a preset, or the one recorded in a trace.

    Args:
        name_or_path: A machine file, or a name among `presets()`; None for the recorded machine. `NAME@HOST` is its GPU
            in another host, such as `rtx4090@ddr5-2ch,16-cores,pcie4x16,256GB`.
        recorded: The machine in the metadata of a trace, None if there is none.
        recorded_in: Where it was recorded, for error messages.

    Raises:
        MachineError: There is no such machine, the host cannot be parsed, or no machine is named or recorded.
    """
    if name_or_path is not None:
        path = Path(name_or_path)
        name, at, host = name_or_path.rpartition("@")
        if at and not os.path.exists(path):
            return with_host(find_machine(name), host)
        if os.path.exists(path) or path.suffix == ".json" or path.name != name_or_path:
            return load_machine(path)
        return preset(name_or_path)
    if recorded is not None:
        return machine_from(recorded, f"the machine of {recorded_in}")
    raise MachineError(
        "there is no machine: name one with --machine, a file (`ebbtide calibrate` writes it) or one of "
        + ", ".join(presets())
    )
