"""The machines that come with ebbtide, and the lookup of a machine by name or file."""

import difflib
import os
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from ebbtide.errors import MachineError
from ebbtide.machines.data_sheets import data_sheet_machine, with_host
from ebbtide.machines.machine import Machine, load_machine, machine_from
from ebbtide.machines.sheets import GPU_SHEETS, PRESET_NAMES, plain_name

# A machine as callers give it: a name of a preset, a file, or the machine itself.
MachineArgument = Machine | str | Path
# Likeness of names, one of which may be meant by the other.
_NEAR = 0.7
_MAX_NEAR = 4
_ANY_PRESET = "the name of one that `ebbtide machines` lists"


def presets() -> list[str]:
    """Return the names of the machines that come with ebbtide: fitted ones, and data
    sheets of GPUs in a host."""
    files = resources.files("ebbtide.machines").joinpath("presets").iterdir()
    return sorted(
        [
            *(
                file.name.removesuffix(".json")
                for file in files
                if file.name.endswith(".json")
            ),
            *GPU_SHEETS,
        ]
    )


def preset(name: str) -> Machine:
    """Load a machine that comes with ebbtide, by its name in `presets()`, or letters
    with which only that begins, or by the name of its GPU as people and drivers write
    it ("4090", "NVIDIA GeForce RTX 4090").

    Raises MachineError, which names those that are meant perhaps, where there is no
    such machine.
    """
    matches = _beginning_with(name)
    full_name = _full_name(name, matches)
    if full_name is None:
        raise MachineError(f"there is no machine {name!r:.80}: {_meant(name, matches)}")
    if full_name in GPU_SHEETS:
        return data_sheet_machine(full_name)
    with resources.as_file(
        resources.files("ebbtide.machines").joinpath("presets", f"{full_name}.json")
    ) as path:
        return load_machine(path)


def named(names: Iterable[str]) -> list[str]:
    """Return the presets that begin with one of some names, or are of a GPU that people
    call so.

    Return all where there are no names.

    Raises MachineError where none begins with a name."""
    chosen: dict[str, None] = {}
    for name in names:
        full_name = _full_name(name, ())
        matches = _beginning_with(name) or ([full_name] if full_name else [])
        if not matches:
            raise MachineError(
                f"there is no machine {name!r:.80}: {_meant(name, matches)}"
            )
        chosen |= dict.fromkeys(matches)
    return list(chosen) or presets()


def _beginning_with(name: str) -> list[str]:
    return (
        [other for other in presets() if other.startswith(name.lower())] if name else []
    )


def _full_name(name: str, matches: Sequence[str]) -> str | None:
    """Return the preset that a name means; None: no one preset.

    `matches`: the presets that begin with it."""
    if name in matches:
        return name
    full_name = PRESET_NAMES.get(plain_name(name))
    if full_name is not None or len(matches) != 1:
        return full_name
    # An L40 is no L40S.
    is_other_model = name[-1].isdigit() and matches[0][len(name)].isalpha()
    return None if is_other_model else matches[0]


def _meant(name: str, matches: Sequence[str]) -> str:
    """Return what to write instead of a name that does not mean one preset."""
    plain = plain_name(name)
    inside = [other for other in presets() if plain and plain in plain_name(other)]
    names = {plain_name(other): other for other in presets()} | PRESET_NAMES
    alike = difflib.get_close_matches(plain, names, n=2 * _MAX_NEAR, cutoff=_NEAR)
    alike = list(dict.fromkeys(names[key] for key in alike))
    near = (matches or inside or alike)[:_MAX_NEAR]
    if not near:
        return f"write {_ANY_PRESET}, or a file"
    meant = " or ".join(filter(None, (", ".join(near[:-1]), near[-1])))
    return f"did you mean {meant}? `ebbtide machines` lists all"


def find_machine(
    machine: MachineArgument | None,
    recorded: dict[str, Any] | None = None,
    recorded_in: str = "the trace",
) -> Machine:
    """Return a machine by file, by the name of a preset, or from a trace that recorded
    it; a machine itself is returned.

    Args:
        machine: A machine, its file, or a name as for `preset`; None for the recorded
            machine. `NAME@HOST` is its GPU in another host, such as
            `rtx4090@ddr5-2ch,16-cores,pcie4x16,256GB`.
        recorded: The machine in the metadata of a trace, None if there is none.
        recorded_in: Where it was recorded, for error messages.

    Raises:
        MachineError: There is no such machine, the host cannot be parsed, or no machine
            is named or recorded.
    """
    if isinstance(machine, Machine):
        return machine
    if machine is not None:
        if not isinstance(machine, str | Path):
            raise MachineError(
                f"machine is {machine!r:.80}: it must be a Machine, its file, or "
                f"{_ANY_PRESET}"
            )
        name_or_path = str(machine)
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
        "there is no machine: name one with --machine, a file (`ebbtide calibrate` "
        f"writes it) or {_ANY_PRESET}"
    )
