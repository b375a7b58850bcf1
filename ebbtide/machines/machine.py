"""The measured rates of a box."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ebbtide.errors import MachineError
from ebbtide.json_files import number, read_object

# What machines of these years lie within; a value beyond that is in the wrong unit.
_RANGES = {
    "gpu_memory_bytes": (1e6, 1e14),
    "host_memory_bytes": (1e6, 1e16),
    "h2d_bytes_per_s": (1e6, 1e13),
    "d2h_bytes_per_s": (1e6, 1e13),
    "duplex_bytes_per_s": (1e6, 2e13),
    "h2d_pageable_bytes_per_s": (1e6, 1e13),
    "d2h_pageable_bytes_per_s": (1e6, 1e13),
    "host_memory_bytes_per_s": (1e6, 1e14),
    "cpu_update_params_per_s": (1e6, 1e13),
    "cpu_cast_params_per_s": (1e6, 1e13),
    "gpu_update_params_per_s": (1e6, 1e15),
    "step_overhead_s": (0.0, 1e4),
}


@dataclass(frozen=True)
class Machine:
    """Rates are of one rank, with nothing else running; None is not known.

    Bytes/s: h2d, d2h (pinned copies, one direction), duplex (both directions together; None: no limit beyond each
    direction's), h2d_pageable, d2h_pageable, host_memory (all traffic of a rank). Parameters/s: cpu_update (one pass:
    state and gradient in, state and half-precision parameter out), cpu_cast (fp32 to half precision), gpu_update.
    step_overhead_s: of an update, whatever its size. more: further keys of the file, kept.
    """

    name: str = "unnamed"
    gpu_memory_bytes: float | None = None
    host_memory_bytes: float | None = None
    h2d_bytes_per_s: float | None = None
    d2h_bytes_per_s: float | None = None
    duplex_bytes_per_s: float | None = None
    h2d_pageable_bytes_per_s: float | None = None
    d2h_pageable_bytes_per_s: float | None = None
    host_memory_bytes_per_s: float | None = None
    cpu_update_params_per_s: float | None = None
    cpu_cast_params_per_s: float | None = None
    gpu_update_params_per_s: float | None = None
    step_overhead_s: float | None = None
    more: dict[str, Any] = field(default_factory=dict)

    def need(self, keys: Iterable[str], why: str) -> None:
        """Raise MachineError where one of the rates is not known."""
        for key in keys:
            if getattr(self, key) is None:
                raise MachineError(
                    f"machine {self.name} has no {key}, which {why} needs: measure it with `ebbtide calibrate`"
                )

    def as_json(self) -> dict[str, Any]:
        """The object of a machine file."""
        known = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "more"}
        return {**known, **self.more}

    def save(self, path: Path) -> None:
        """Write a machine file. Raises MachineError where that fails."""
        try:
            path.write_text(json.dumps(self.as_json(), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise MachineError(f"cannot write {path}: {error.strerror or error}") from None


def machine_from(values: dict[str, Any], where: str) -> Machine:
    """A machine from the object of a machine file. Raises MachineError for values that cannot be."""
    name = where if values.get("name") is None else values["name"]
    if not isinstance(name, str):
        raise MachineError(f"{where}: name is not a text")
    # A rate of 0 would be a resource that is not there: then it is null.
    rates = {key: number(values, key, MachineError, where, most, least) for key, (least, most) in _RANGES.items()}
    more = {key: value for key, value in values.items() if key not in _RANGES and key != "name"}
    return Machine(name=name, **rates, more=more)


def load_machine(path: Path) -> Machine:
    """Read a machine file. Raises MachineError where it is none."""
    return machine_from(read_object(path, "machine", MachineError), path.name)
