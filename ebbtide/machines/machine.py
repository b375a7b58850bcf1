"""The measured rates of a machine, and their file."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from ebbtide.errors import MachineError
from ebbtide.json_files import convert_object, number_range, read_object

# Ranges of today's machines; a value outside of them is in the wrong unit. A rate of 0 would be a resource that the
# machine does not have, which is null.
DeviceBytes = Annotated[float, number_range(1e6, 1e14)]
HostBytes = Annotated[float, number_range(1e6, 1e16)]
Rate = Annotated[float, number_range(1e6, 1e13)]
DuplexRate = Annotated[float, number_range(1e6, 2e13)]
HostMemoryRate = Annotated[float, number_range(1e6, 1e14)]
GpuRate = Annotated[float, number_range(1e6, 1e15)]
OverheadS = Annotated[float, number_range(0.0, 1e4)]


@dataclass(frozen=True)
class Machine:
    """Rates of one rank, with nothing else running; None is not known.

    Attributes:
        name: The name, for people.
        gpu_memory_bytes: Memory of the rank's GPU.
        host_memory_bytes: The rank's part of the host's memory.
        h2d_bytes_per_s: Pinned copies to the device, with no copies in the other direction.
        d2h_bytes_per_s: Pinned copies to the host, with no copies in the other direction.
        duplex_bytes_per_s: Both directions together; None: no limit beyond that of each direction.
        h2d_pageable_bytes_per_s: Copies to the device from pageable memory.
        d2h_pageable_bytes_per_s: Copies to pageable memory.
        host_memory_bytes_per_s: All traffic of a rank with host memory.
        cpu_update_params_per_s: Parameters updated on the CPU in one pass: state and gradient in, state and
            half-precision parameter out.
        cpu_cast_params_per_s: Parameters converted from fp32 to half precision on the CPU.
        gpu_update_params_per_s: Parameters updated on the GPU.
        step_overhead_s: The time of an update that does not depend on its size.
        extra: Further keys of the file, which are kept.
    """

    name: Annotated[str, Meta(description="a text")] = "unnamed"
    gpu_memory_bytes: DeviceBytes | None = None
    host_memory_bytes: HostBytes | None = None
    h2d_bytes_per_s: Rate | None = None
    d2h_bytes_per_s: Rate | None = None
    duplex_bytes_per_s: DuplexRate | None = None
    h2d_pageable_bytes_per_s: Rate | None = None
    d2h_pageable_bytes_per_s: Rate | None = None
    host_memory_bytes_per_s: HostMemoryRate | None = None
    cpu_update_params_per_s: Rate | None = None
    cpu_cast_params_per_s: Rate | None = None
    gpu_update_params_per_s: GpuRate | None = None
    step_overhead_s: OverheadS | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def need(self, keys: Iterable[str], why: str) -> None:
        """Raise MachineError where one of the rates is not known. why: what needs it, for the message."""
        for key in keys:
            if getattr(self, key) is None:
                raise MachineError(
                    f"machine {self.name} has no {key}, which {why} needs: measure it with `ebbtide calibrate`"
                )

    def as_json(self) -> dict[str, Any]:
        """Return the object of a machine file."""
        return {**{key: getattr(self, key) for key in _KEYS}, **self.extra}

    def save(self, path: Path) -> None:
        """Write a machine file. Raises MachineError where that fails."""
        try:
            path.write_text(json.dumps(self.as_json(), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise MachineError(f"cannot write {path}: {error.strerror or error}") from None


_KEYS = tuple(item.name for item in fields(Machine) if item.name != "extra")


def machine_from(values: dict[str, Any], where: str) -> Machine:
    """Convert the object of a machine file.

    Args:
        values: The object; null is not known.
        where: The source, for messages; it names a machine without a name.

    Raises:
        MachineError: A value has the wrong type or is out of range.
    """
    extra = {key: value for key, value in values.items() if key not in _KEYS}
    rates = {"name": where, **{key: values[key] for key in _KEYS if values.get(key) is not None}}
    return convert_object({**rates, "extra": extra}, Machine, where, MachineError)


def load_machine(path: Path) -> Machine:
    """Read a machine file. Raises MachineError where it is not a valid one."""
    return machine_from(read_object(path, "machine", MachineError), path.name)
