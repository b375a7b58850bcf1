"""Rates of storage that schedules show.

Each path has a rate of reads, a rate of writes, and the limit of both at once.

Reads that run while nothing is written show the rate of reads, and writes alike. What
is moved while a path works in both directions shows their limit.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ebbtide.interleave.engine.adaptive.rates import ObservedRates
from ebbtide.interleave.model.operations import numbered_lane
from ebbtide.interleave.model.plan import STORAGE_RESOURCES
from ebbtide.interleave.model.schedule import Schedule
from ebbtide.machines.machine import Machine, StoragePath

_READ, _WRITE, _BOTH = "read_bytes_per_s", "write_bytes_per_s", "duplex_bytes_per_s"
_NAMES = (_READ, _WRITE, _BOTH)
# An operation is alone if its path works in the other direction for at most this share
# of its time.
_ALONE = 0.02
# A path shows its limit if it works in both directions for at least this share of the
# time of its operations.
_SHOWS_BOTH = 0.05


class _Transfers:
    """The reads, or the writes, of a path in a schedule.

    Attributes:
        shared_s: Seconds of each in which the path also works in the other direction.
    """

    def __init__(self, schedule: Schedule, lane: str) -> None:
        rows = [
            (op.nbytes, start, end)
            for op, start, end in schedule.items()
            if op.resource == lane
        ]
        self.nbytes, self._starts, self._ends = np.array(rows).reshape(-1, 3).T
        self.seconds = self._ends - self._starts
        self.shared_s = np.zeros(len(rows))

    def share_path_with(self, other: "_Transfers") -> None:
        """Set the seconds in which transfers in the other direction run, too."""
        last_start = np.maximum.outer(self._starts, other._starts)
        first_end = np.minimum.outer(self._ends, other._ends)
        self.shared_s = np.maximum(first_end - last_start, 0.0).sum(axis=1)

    def rate(self, needs_alone: bool) -> float | None:
        """Return the bytes per second of operations that are alone.

        If there are none and it does not need them, return the rate of all.
        """
        chosen = self.shared_s <= _ALONE * self.seconds
        if not chosen.any() and not needs_alone:
            chosen[:] = True
        seconds = self.seconds[chosen].sum()
        return float(self.nbytes[chosen].sum() / seconds) if seconds > 0 else None

    def bytes_in_both(self, rate: float) -> float:
        """Return the bytes that a path moves while it works in both directions, by the
        rate of the rest."""
        return float(self.nbytes.sum() - rate * (self.seconds - self.shared_s).sum())


def _path_rates(schedule: Schedule, number: int, path: StoragePath) -> dict[str, float]:
    reads, writes = (
        _Transfers(schedule, numbered_lane(name, number)) for name in STORAGE_RESOURCES
    )
    reads.share_path_with(writes)
    writes.share_path_with(reads)
    together = path.read_bytes_per_s + path.write_bytes_per_s
    needs_alone = (
        path.duplex_bytes_per_s is not None and path.duplex_bytes_per_s < together
    )
    own = {_READ: reads.rate(needs_alone), _WRITE: writes.rate(needs_alone)}
    shown = {name: rate for name, rate in own.items() if rate}
    both_s = reads.shared_s.sum()
    if both_s > _SHOWS_BOTH * (reads.seconds.sum() + writes.seconds.sum()):
        read_rate = shown.get(_READ, path.read_bytes_per_s)
        write_rate = shown.get(_WRITE, path.write_bytes_per_s)
        moved = reads.bytes_in_both(read_rate) + writes.bytes_in_both(write_rate)
        shown |= {_BOTH: moved / both_s} if moved > 0 else {}
    return shown


def _named(number: int, name: str) -> str:
    return f"storage[{number}].{name}"


def _planning(machine: Machine) -> dict[str, float | None]:
    paths = enumerate(machine.storage)
    return {
        _named(number, name): getattr(path, name)
        for number, path in paths
        for name in _NAMES
    }


def _observed(schedule: Schedule, machine: Machine) -> dict[str, float]:
    shown: dict[str, float] = {}
    for number, path in enumerate(machine.storage):
        shown |= {
            _named(number, name): rate
            for name, rate in _path_rates(schedule, number, path).items()
        }
    return shown


def _scaled(machine: Machine, factors: Mapping[str, float]) -> Machine:
    storage = []
    for number, path in enumerate(machine.storage):
        rates = {name: rate for name in _NAMES if (rate := getattr(path, name))}
        changed = {
            name: rate * factors.get(_named(number, name), 1.0)
            for name, rate in rates.items()
        }
        storage.append(replace(path, **changed))
    return replace(machine, storage=tuple(storage))


STORAGE_RATES = ObservedRates(_planning, _observed, _scaled)
