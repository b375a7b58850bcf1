"""Storages of activations on the device, on the host or on both, and their copies over
the link."""

import gc
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple, TypeVar

import torch

from ebbtide.features.layers.engine.memory import HostArena, HostCopy, LayerMemoryCount
from ebbtide.interleave.engine.devices.device import Device, Direction, Mark
from ebbtide.interleave.engine.errors import DeviceMemoryError

# Parts of a host block begin at multiples of this.
_ALIGNMENT = 64
# What a device raises that has too little memory, and what the allocator of a GPU does.
NO_MEMORY = (DeviceMemoryError, torch.OutOfMemoryError)


T = TypeVar("T")


class SavedStorage:
    """A storage that layers have saved for the backward. All tensors in it share this
    object.

    Attributes:
        first: The layer that has saved it first, and the number of the saved tensor
            there.
        layer: The last layer that has saved it, which is the first one whose backward
            uses it.
        stays: Whether that layer keeps it on the device.
        keeper: The first layer that keeps what it has saved, of those that have saved
            this.
        host: Its copy; None before there is one.
        arrival: The end of the copy that has brought it back; None while it is where
            the job has put it.
    """

    def __init__(self, storage: torch.UntypedStorage, first: tuple[int, int]) -> None:
        self.first = first
        self.layer = first[0]
        self.nbytes = storage.nbytes()
        self.stays = False
        self.keeper: int | None = None
        self.host: torch.Tensor | None = None
        self.host_copy: HostCopy | None = None
        self.arrival: Mark | None = None
        self.put(storage)

    def put(self, storage: torch.UntypedStorage) -> None:
        """Hold a storage on the device with its values."""
        self._storage: torch.UntypedStorage | None = storage
        self._alive: Callable[[], torch.UntypedStorage | None] = weakref.ref(storage)

    def hold(self) -> torch.UntypedStorage | None:
        """Return the storage on the device, and hold it; None if it was freed. Others
        may have kept it alive."""
        if self._storage is None:
            self._storage = self._alive()
        return self._storage

    def is_in(self, storage: torch.UntypedStorage) -> bool:
        return self._alive() is storage

    @property
    def is_of_others(self) -> bool:
        """Whether the storage is on the device because the job holds it, too."""
        return self._storage is None and self._alive() is not None

    def release(self) -> None:
        """Release the storage on the device, if a copy exists and no layer keeps it."""
        if self.host is not None and not self.stays:
            self._storage = None

    def forget(self) -> None:
        """Hold the storage on the device no longer.

        Do not use it if others do: its values may be old.
        """
        self._storage = None
        self._alive = lambda: None


class Flight(NamedTuple):
    """Copies that have been issued, with what they read or write until the job has
    waited for them."""

    direction: Direction
    start: Mark
    end: Mark
    nbytes: int
    storages: Sequence[SavedStorage]
    memory: Sequence[torch.Tensor]
    thread: int


class StorageTransfers:
    """Copies storages to the host and back on the streams of a device, within the
    memory of activations.

    Memory that a copy uses is not freed before the job's stream has waited for the
    copy: so it may be allocated again in the order of that stream.

    Attributes:
        measures: Whether the times of copies are kept, for `rates`, and the times that
            the job waits for them.
        waits: The starts and ends of that.
        evict: Issues copies to the host where the plan has not counted all memory.
            Returns whether there are any.
    """

    def __init__(
        self, device: Device, memory: LayerMemoryCount, arena: HostArena
    ) -> None:
        self.device = device
        self.memory = memory
        self.arena = arena
        self.measures = False
        self.waits: list[Mark] = []
        self.evict: Callable[[], bool] = bool
        self._flights: list[Flight] = []
        self._ended: list[Flight] = []
        self._moved: dict[Direction, tuple[int, float]] = {
            "h2d": (0, 0.0),
            "d2h": (0, 0.0),
        }

    def count(self, storage: torch.UntypedStorage) -> None:
        """Count a storage that is on the device, until it is freed. Raises
        DeviceMemoryError."""
        if not self.memory.is_counted(storage):
            self._claim(storage.nbytes())
            self.memory.count(storage)

    def _claim(self, nbytes: int, is_needed: bool = True) -> None:
        """Claim device memory.

        Where there is too little, wait for copies to the host that free some.
        """
        self._take(lambda: self.memory.claim(nbytes), is_needed)

    def _take(self, take: Callable[[], T], is_needed: bool) -> T:
        """Take device memory.

        Where there is too little, wait for copies to the host that free some.
        """
        while True:
            try:
                return take()
            except DeviceMemoryError:
                # Compute does not wait for what is copied ahead.
                down = next(
                    (
                        one
                        for one in self._flights
                        if one.direction == "d2h" and (is_needed or one.end.is_passed)
                    ),
                    None,
                )
                if down is None:
                    if not is_needed:
                        raise
                    if self.evict():
                        continue
                    # Cycles of references, as imports and errors leave them, may hold
                    # tensors.
                    gc.collect()
                    return take()
                self.land(down)
                # Else it would hold the memory while the next claim is made.
                del down

    def down(self, storages: Sequence[SavedStorage]) -> None:
        """Issue copies to the host, after what the job has issued so far."""
        sources = [
            (one, bytes_of(storage))
            for one in storages
            if (storage := one.hold()) is not None
        ]
        if not sources:
            return
        sizes = [-(-source.nbytes // _ALIGNMENT) * _ALIGNMENT for _, source in sources]
        copy = self.arena.take(sum(sizes))
        parts = copy.memory[: sum(sizes)].split(sizes)
        pairs = [
            (source, whole[: source.nbytes])
            for (_, source), whole in zip(sources, parts, strict=True)
        ]
        self.issue("d2h", pairs, [copy], [one for one, _ in sources])
        # A copy that was not issued is none.
        for (one, _), (_, host) in zip(sources, pairs, strict=True):
            one.host_copy, one.host = copy, host

    def bring_back(self, storages: Collection[SavedStorage], where: str) -> None:
        """Bring storages back to the device, and let the job wait for them. Raises
        DeviceMemoryError, which names where they are needed."""
        try:
            self._up(storages, is_needed=True)
        except DeviceMemoryError as error:
            raise DeviceMemoryError(f"{where}: {error}") from error
        self.wait_for("h2d", storages)

    def prefetch(self, storages: Collection[SavedStorage]) -> bool:
        """Issue copies back to the device of what will be needed, and return whether
        there is memory for it now.

        It collects no garbage, which may take longer than a layer: without memory they
        come back when needed."""
        try:
            self._up(storages, is_needed=False)
        except NO_MEMORY:
            return False
        return True

    def _up(self, storages: Collection[SavedStorage], is_needed: bool) -> None:
        missing = [
            one for one in storages if one.hold() is None and one.host is not None
        ]
        if not missing:
            return
        uncounted_bytes = sum(one.nbytes for one in missing)
        self._claim(uncounted_bytes, is_needed)
        try:
            pairs = []
            for one in missing:
                assert one.host is not None
                target = self._take(
                    partial(self.device.allocate_bytes, one.nbytes), is_needed
                )
                self.memory.count(target.untyped_storage())
                uncounted_bytes -= one.nbytes
                pairs.append((one.host, target))
            copies = [one.host_copy for one in missing if one.host_copy is not None]
            flight = self.issue("h2d", pairs, copies, missing)
            for one, (_, target) in zip(missing, pairs, strict=True):
                one.put(target.untyped_storage())
                one.arrival = flight.end
        except BaseException:
            # None of them is there, whichever failed.
            for one in missing:
                one.forget()
            self.memory.unclaim(uncounted_bytes)
            raise

    def use(self, saved: SavedStorage, tensor: torch.Tensor) -> None:
        """Let the job's current stream use a tensor in a storage.

        Another stream may have waited for the storage.
        """
        if saved.arrival is not None:
            self.device.wait("job", [saved.arrival])
            self.device.share(tensor)

    def issue(
        self,
        direction: Direction,
        pairs: list[tuple[torch.Tensor, torch.Tensor]],
        copies: Collection[HostCopy] = (),
        storages: Sequence[SavedStorage] = (),
    ) -> Flight:
        """Issue copies of each (source, target) after what the job has issued and what
        used their host blocks."""
        device = self.device
        marks = chain.from_iterable(copy.marks for copy in copies)
        nbytes, memory = (
            sum(source.nbytes for source, _ in pairs),
            [tensor for pair in pairs for tensor in pair],
        )
        try:
            device.wait(direction, [device.record("job"), *dict.fromkeys(marks)])
            start = device.record(direction)
            device.copy(direction, pairs)
            end = device.record(direction)
            for copy in copies:
                copy.marks = [end]
            flight = Flight(
                direction, start, end, nbytes, storages, memory, threading.get_ident()
            )
            self._flights.append(flight)
            return flight
        except BaseException:
            # Some may have been issued, and their memory is about to be freed.
            device.record(direction).synchronize()
            raise

    def copy_now(
        self, direction: Direction, source: torch.Tensor, target: torch.Tensor
    ) -> None:
        """Copy a tensor, and return when that is done."""
        flight = self.issue(direction, [(source, target)])
        self.synchronize(flight)
        self.land(flight)

    def synchronize(self, flight: Flight) -> None:
        """Return when a copy is done. Compute waits where the thread that has issued
        the copy does."""
        start = (
            self.device.record("job")
            if self.measures and flight.thread == threading.get_ident()
            else None
        )
        flight.end.synchronize()
        if start is not None:
            self.waits += [start, self.device.record("job")]

    def wait(
        self, direction: Direction, is_awaited: Callable[[SavedStorage], bool]
    ) -> None:
        """Let the job wait for all copies in a direction of selected storages.

        A function selects them.
        """
        for flight in [one for one in self._flights if one.direction == direction]:
            if any(map(is_awaited, flight.storages)):
                self.land(flight)

    def wait_for(self, direction: Direction, storages: Iterable[SavedStorage]) -> None:
        """Let the job wait for copies in a direction of these storages."""
        wanted = {id(one) for one in storages}
        self.wait(direction, lambda one: id(one) in wanted)

    def finish(self, direction: Direction) -> None:
        """Return when all copies in a direction are done.

        Copies that only the job's stream waits for count, too.
        """
        self.device.record(direction).synchronize()

    def release_passed(self) -> None:
        """Release what copies that have ended used."""
        for flight in [*self._flights]:
            if flight.end.is_passed:
                self.land(flight)

    def land(self, flight: Flight) -> None:
        """Let the job wait for a copy. What was copied to the host is then released on
        the device."""
        start = self.device.record("job") if self.measures else None
        self.device.wait("job", [flight.end])
        self._flights = [other for other in self._flights if other is not flight]
        for tensor in flight.memory:
            self.device.share(tensor)
        if flight.direction == "d2h":
            for one in flight.storages:
                one.release()
        if start is not None:
            self.waits += [start, self.device.record("job")]
            self._ended.append(flight._replace(storages=(), memory=()))

    def rates(self) -> dict[Direction, float | None]:
        """Return the measured rates of the copies so far, in bytes per second.

        Return None where there were none.
        """
        for flight in self._ended:
            flight.end.synchronize()
            nbytes, seconds = self._moved[flight.direction]
            seconds += flight.end.time_s - flight.start.time_s
            self._moved[flight.direction] = nbytes + flight.nbytes, seconds
        self._ended.clear()
        return {
            name: nbytes / seconds if seconds > 0 else None
            for name, (nbytes, seconds) in self._moved.items()
        }


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a storage as a tensor of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
