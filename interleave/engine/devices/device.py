"""What the executor needs of a device; `EmulatedDevice` and `CudaDevice` are the two there are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

import torch

from ebbtide.interleave.engine.numerics.reference import Scalars

Direction = Literal["h2d", "d2h"]


class Device(Protocol):
    """Calls come from the executor's threads, at most one at a time for `update` and for each direction of `copy`; each
    returns when its work is done."""

    def state(self, params: int, rows: int = 3) -> torch.Tensor:
        """Room for so many parameters, (rows, params) fp32. Raises DeviceMemoryError where there is none."""
        ...

    def release(self, tensor: torch.Tensor) -> None:
        """Give room back."""
        ...

    def host(self, shape: tuple[int, ...], dtype: torch.dtype, pinned: bool = True) -> torch.Tensor:
        """Host memory of exactly this size. Raises EngineError where there is none."""
        ...

    def copy(self, direction: Direction, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy (from, to) over the link, one after the other."""
        ...

    def update(
        self,
        grad: torch.Tensor,
        master: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        out: torch.Tensor,
        scalars: Scalars,
    ) -> None:
        """The reference's update, of what lies on the device."""
        ...

    def squares(self, gradient: torch.Tensor) -> Callable[[], float]:
        """`norm.sum_of_squares` of a gradient that lies on the device, as it is now: what is returned waits for it.
        Called where the gradient was made, by the training thread or autograd's."""
        ...

    def mark(self) -> Callable[[], None]:
        """What is returned waits for all that this thread has issued so far."""
        ...

    def wait(self) -> None:
        """Called by the training thread: what it has issued so far is done when this returns."""
        ...

    def free_bytes(self) -> float | None:
        """What state may take of the device's memory, all in all; None where there is no limit."""
        ...

    @property
    def used_bytes(self) -> int:
        """Taken by state and gradients."""
        ...

    def close(self) -> None:
        """End threads."""
        ...
