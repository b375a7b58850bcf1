"""A small workload and machine for tests, as objects and as files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ebbtide.interleave.model.workload import Workload, workload_from
from ebbtide.machines.accuracy import RATES
from ebbtide.machines.machine import Machine, machine_from

MACHINE: dict[str, Any] = {
    "name": "box",
    "gpu_memory_bytes": 80e9,
    "host_memory_bytes": 200e9,
    "h2d_bytes_per_s": 50e9,
    "d2h_bytes_per_s": 50e9,
    "h2d_pageable_bytes_per_s": 15e9,
    "d2h_pageable_bytes_per_s": 3e9,
    "host_memory_bytes_per_s": 84e9,
    "cpu_update_params_per_s": 2.3e9,
    "cpu_cast_params_per_s": 2e10,
    "gpu_update_params_per_s": 5e10,
}
WORKLOAD: dict[str, Any] = {
    "name": "job",
    "params": 2e9,
    "subgroup_params": 1e8,
    "forward_s": 0.2,
    "backward_s": 0.6,
    "gpu_free_bytes": [
        {"at_s": 0, "bytes": 20e9},
        {"at_s": 0.2, "bytes": 6e9},
        {"at_s": 0.8, "bytes": 30e9},
    ],
}


def machine(**changes: Any) -> Machine:
    """Return a machine; a `fit` among the changes is one of its rates."""
    values = MACHINE | changes
    if "fit" in changes:
        values["fit"] = {
            "rates": {key: values[key] for key in RATES & values.keys()}
        } | changes["fit"]
    return machine_from(values, "box")


def workload(**changes: Any) -> Workload:
    return workload_from(WORKLOAD | changes, "job")


def write_files(folder: Path) -> None:
    """Write w.json and m.json for commands."""
    (folder / "w.json").write_text(json.dumps(WORKLOAD))
    (folder / "m.json").write_text(json.dumps(MACHINE))
