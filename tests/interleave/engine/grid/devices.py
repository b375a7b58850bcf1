"""An emulated device with rates, random delays, and allocations that fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from ebbtide.interleave.engine.devices.device import Direction
from tests.interleave.engine.twins import Jitter, JitteryDevice


class GridDevice(JitteryDevice):
    """An emulated device on which a number of allocations succeed before one fails;
    None: all do."""

    successes: int | None = None
    # Sees each copy when it is issued.
    watch: (
        Callable[[Direction, Sequence[tuple[torch.Tensor, torch.Tensor]]], None] | None
    ) = None

    @classmethod
    @contextmanager
    def opened(
        cls, seed: int, rates: tuple[float | None, float | None], is_jittery: bool
    ) -> Iterator[GridDevice]:
        device = cls(Jitter(seed, 5e-4 if is_jittery else 0.0))
        device.rates = {"h2d": rates[0], "d2h": rates[1]}
        try:
            yield device
        finally:
            device.close()

    @contextmanager
    def failing(self, successes: int) -> Iterator[None]:
        """Let an allocation fail after a number of others."""
        self.successes = successes
        try:
            yield
        finally:
            self.successes = None

    def copy(
        self, direction: Direction, pairs: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        if self.watch is not None:
            self.watch(direction, pairs)
        super().copy(direction, pairs)

    def allocate_bytes(self, nbytes: int) -> torch.Tensor:
        self._count()
        return super().allocate_bytes(nbytes)

    def allocate_host(
        self, shape: tuple[int, ...], dtype: torch.dtype, pinned: bool = True
    ) -> torch.Tensor:
        self._count()
        return super().allocate_host(shape, dtype, pinned)

    def _count(self) -> None:
        if self.successes is None:
            return
        self.successes -= 1
        if self.successes < 0:
            self.successes = None
            raise torch.OutOfMemoryError("out of memory (imitated)")
