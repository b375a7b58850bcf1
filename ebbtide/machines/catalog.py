"""The machines that come with ebbtide."""

from __future__ import annotations

from importlib import resources

from ebbtide.errors import MachineError
from ebbtide.machines.machine import Machine, load_machine


def presets() -> list[str]:
    """Return the names of the machines that come with ebbtide."""
    files = resources.files("ebbtide.machines").joinpath("presets").iterdir()
    return sorted(file.name.removesuffix(".json") for file in files if file.name.endswith(".json"))


def preset(name: str) -> Machine:
    """Load a machine that comes with ebbtide. Raises MachineError where `name` is not among `presets()`."""
    if name not in presets():
        raise MachineError(f"there is no machine {name!r}: name a file, or one of {', '.join(presets())}")
    with resources.as_file(resources.files("ebbtide.machines").joinpath("presets", f"{name}.json")) as path:
        return load_machine(path)
