"""The device protocol: the operations that the engine needs; `EmulatedDevice` and `CudaDevice` implement it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Literal, Protocol

import torch

from ebbtide.interleave.engine.numerics.reference import Scalars

Direction = Literal["h2d", "d2h"]


class Device(Protocol):
    """A device that stores and updates optimizer state.

    The threads of the executor call it, with at most one call at a time for `update` and for each direction of `copy`.
    Each call returns when its work is done.
    """

    def allocate_state(self, params: int, rows: int = 3) -> torch.Tensor:
        """Allocate device memory for the state of `params` parameters.

        Returns:
            A tensor of shape (rows, params), fp32.

        Raises:
            DeviceMemoryError: If the device has too little free memory.
        """
        ...

    def release(self, tensor: torch.Tensor) -> None:
        """Free memory from `allocate_state`."""
        ...

    def allocate_host(self, shape: tuple[int, ...], dtype: torch.dtype, pinned: bool = True) -> torch.Tensor:
        """Allocate host memory of exactly this size. Raises EngineError if there is not enough."""
        ...

    def copy(self, direction: Direction, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy each (source, target) over the link, one after the other."""
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
        """Run the update of `reference` on tensors on the device.

        Raises:
            UpdateNotStarted: If the update could not start: nothing was changed. After any other error nobody knows
                what was changed.
        """
        ...

    def sum_of_squares(self, gradient: torch.Tensor) -> Callable[[], float]:
        """Start `norm.sum_of_squares` of a gradient on the device, with the values that it has now.

        The training thread or autograd's thread calls this, the one that computed the gradient.

        Returns:
            A function that waits for the result.
        """
        ...

    def warm_up(self, dtypes: Collection[tuple[torch.dtype, torch.dtype]]) -> None:
        """Compile the kernels of `update`, `sum_of_squares` and `fingerprint`, and run them on a few elements.

        Args:
            dtypes: The dtypes of the gradient and the parameter, for each combination that updates will have.

        Raises:
            EngineError: If a kernel cannot be compiled or run.
        """
        ...

    def fingerprint(self, values: Sequence[torch.Tensor]) -> Callable[[], list[int]]:
        """Start `fingerprint.fingerprint` of each tensor on the device, with the values that they have now.

        Args:
            values: Parameters, flat, on the device. The training thread has issued all work on them.

        Returns:
            A function that waits for the results.
        """
        ...

    def is_capturing(self) -> bool:
        """Return whether the calling thread captures its work in a CUDA graph instead of running it."""
        ...

    def record_event(self) -> Callable[[], None]:
        """Return a function that waits for everything that the calling thread has issued so far."""
        ...

    def synchronize(self) -> None:
        """Wait for everything that the calling thread, the training thread, has issued so far."""
        ...

    def sample_memory(self) -> None:
        """Record how much device memory the job uses now, for `free_bytes`. The training thread calls this."""
        ...

    def free_bytes(self) -> float | None:
        """Return how much device memory state may use in total, in bytes; None if there is no limit."""
        ...

    @property
    def used_bytes(self) -> int:
        """Device memory in use by state and gradients, in bytes."""
        ...

    def close(self) -> None:
        """End the threads of the device."""
        ...
