"""The lanes of a machine, and the bandwidth that they share.

One operation runs at a time on each lane.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from ebbtide import seams
from ebbtide.interleave.simulation.fluid import INFINITE, Bandwidth
from ebbtide.machines.machine import Machine


class Pool(NamedTuple):
    """Bandwidth that lanes share.

    All are slowed by one factor if they need more than it has.

    Attributes:
        name: Its name.
        bytes_per_s: Its limit; None for no limit.
        parent: The pool that it draws from.
        is_fair: Whether its two lanes each get half of the bandwidth instead, and what
            the other lane leaves of its half.
    """

    name: str
    bytes_per_s: float | None
    parent: str | None = None
    is_fair: bool = False


class Lane(NamedTuple):
    """A lane and the pool that slows it."""

    name: str
    pool: str | None = None


class Lanes:
    """The lanes of a machine: the core's, and lanes that features add by the seam
    `lanes`.

    Attributes:
        index: The number of each lane by its name.
        bandwidth: The limits of the lanes, in all modes so far.
    """

    def __init__(self, machine: Machine) -> None:
        added = [
            entry for lanes_of in seams.load_all("lanes") for entry in lanes_of(machine)
        ]
        # What stops compute comes after it.
        lanes = [
            Lane("cpu", "host memory"),
            Lane("h2d", "link"),
            Lane("d2h", "link"),
            *(entry for entry in added if isinstance(entry, Lane)),
            Lane("compute"),
            Lane("gpu"),
        ]
        # A pool comes before its parent.
        pools = [
            Pool("link", machine.duplex_bytes_per_s, "host memory", is_fair=True),
            *(entry for entry in added if isinstance(entry, Pool)),
            Pool("host memory", machine.host_memory_bytes_per_s),
        ]
        self.index = {lane.name: number for number, lane in enumerate(lanes)}
        numbers = {pool.name: number for number, pool in enumerate(pools)}
        self._scales = [[1.0] * len(lanes)]
        self.bandwidth = Bandwidth(
            pool=np.array([numbers.get(lane.pool or "", -1) for lane in lanes]),
            parent=np.array([numbers.get(pool.parent or "", -1) for pool in pools]),
            limit=np.array([pool.bytes_per_s or INFINITE for pool in pools]),
            is_fair=np.array([pool.is_fair for pool in pools]),
            scales=np.array(self._scales),
        )

    def mode(self, scales: Mapping[str, float]) -> int:
        """Return the number of a mode.

        Lanes have a share of their speed while a task with it runs.
        """
        row = [scales.get(name, 1.0) for name in self.index]
        if row not in self._scales:
            self._scales.append(row)
            self.bandwidth = self.bandwidth._replace(scales=np.array(self._scales))
        return self._scales.index(row)
