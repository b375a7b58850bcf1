"""Lanes of storage: reads and writes of each path, which share what it moves."""

from collections.abc import Iterator

from ebbtide.interleave.model.operations import numbered_lane
from ebbtide.interleave.simulation.lanes import Lane, Pool
from ebbtide.machines.machine import Machine


def storage_lanes(machine: Machine) -> Iterator[Lane | Pool]:
    """Yield the lanes of each path, and the pool that both draw from."""
    for number, path in enumerate(machine.storage):
        pool = f"storage {number}"
        yield Pool(pool, path.duplex_bytes_per_s, "host memory")
        for resource in ("storage_read", "storage_write"):
            yield Lane(numbered_lane(resource, number), pool)
