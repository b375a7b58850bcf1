"""The device protocol: the operations that the engine needs.

`EmulatedDevice` and `CudaDevice` implement it.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Literal, Protocol

import torch

from ebbtide.interleave.engine.numerics.reference import TensorUpdate
from ebbtide.interleave.engine.rules.adamw import ADAMW
from ebbtide.interleave.engine.rules.rule import UpdateRule

Direction = Literal["h2d", "d2h"]
# Queues of work on the device: one for each resource of a plan, the queue to which the
# calling thread issues its own work (`job`), and the job's queue in whose order memory
# is allocated (`memory`).
Stream = Literal["h2d", "d2h", "gpu", "job", "memory"]


class Mark(Protocol):
    """A point of a stream, which the stream passes when all work before it is done."""

    def synchronize(self) -> None:
        """Wait until the stream has passed it. Raises if work before it failed; the
        device cannot be used any more."""

    @property
    def is_passed(self) -> bool:
        """Whether the stream has passed it."""

    @property
    def time_s(self) -> float:
        """When the stream passed it, on the clock of time.perf_counter. Only after
        `synchronize`."""


class Streams(Protocol):
    """Work on a device: each stream does what is issued to it in order."""

    def thread_setup(self) -> AbstractContextManager[None]:
        """Return a context in which the calling thread may use the device and wait for
        it.

        A GPU is the thread's current device, and its calls do not end the capture of a
        CUDA graph on another thread."""

    def wait(self, stream: Stream, marks: Sequence[Mark]) -> None:
        """Let a stream wait for marks, before it runs what is issued from now on."""

    def record(self, stream: Stream) -> Mark:
        """Return a mark behind everything that was issued to a stream so far."""


class Device(Streams, Protocol):
    """A device that stores and updates optimizer state. The executor's threads call it,
    one at a time for each stream. `copy` and `update` return when their work is issued;
    a mark tells when it is done."""

    # The NUMA node of the host next to the device; None if there is one only, or it is
    # not known.
    numa_node: int | None
    # Whether a forked child can use it.
    survives_forks: bool = True

    @property
    def torch_device(self) -> torch.device:
        """The device of its memory."""
        return torch.device("cpu")

    def allocate_state(self, params: int, rows: int = 3) -> torch.Tensor:
        """Allocate device memory of shape (rows, params), fp32. Raises
        DeviceMemoryError if there is too little.

        The stream `memory` may still use it for what it held before: others wait for a
        mark of that stream."""

    def release(self, tensor: torch.Tensor) -> None:
        """Free memory from `allocate_state`, which no stream uses any more."""

    def claim(self, nbytes: int) -> None:
        """Count device memory that the job itself has allocated. Raises
        DeviceMemoryError if there is too little.

        Only an emulated device counts it: the allocator of a GPU has its own limit."""
        return

    def unclaim(self, nbytes: int) -> None:
        """Count no longer what `claim` has counted."""
        return

    def allocate_bytes(self, nbytes: int) -> torch.Tensor:
        """Allocate device memory (uint8), to be claimed before.

        The memory is allocated in the order of the calling thread's current stream.
        """

    def allocate_host(
        self, shape: tuple[int, ...], dtype: torch.dtype, pinned: bool = True
    ) -> torch.Tensor:
        """Allocate host memory of exactly this size. Raises EngineError if there is not
        enough."""

    def copy(
        self, direction: Direction, pairs: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        """Issue copies of each (source, target) over the link, one after the other, on
        the stream of the direction."""

    def update(self, updates: Sequence[TensorUpdate]) -> None:
        """Issue `reference`'s update on tensors on the device, to the stream `gpu`.

        Raises UpdateNotStarted if nothing was changed. After any other error nobody
        knows what was changed."""

    def sums_of_squares(
        self, gradients: Sequence[torch.Tensor]
    ) -> Callable[[], list[float]]:
        """Start `norm.sum_of_squares` of gradients on the device.

        Return a function that waits for the results.

        They are of the values that the gradients have now. The thread that computed
        these calls this."""

    def warm_up(
        self,
        dtypes: Collection[tuple[torch.dtype, torch.dtype]],
        rule: UpdateRule = ADAMW,
    ) -> None:
        """Compile the device's kernels of `update`, `sums_of_squares` and
        `fingerprint`, and run them on a few elements.

        There is one for each combination of dtypes of gradient and parameter.
        """

    def fingerprint(self, values: Sequence[torch.Tensor]) -> Callable[[], list[bytes]]:
        """Start `fingerprint.fingerprint` of flat parameters.

        Return a function that waits for the results.

        They are of the values that the parameters have now. The training thread has
        issued all work on them."""

    def is_capturing(self) -> bool:
        """Return whether the calling thread captures its work in a CUDA graph, and so
        does not run it."""

    def share(self, tensor: torch.Tensor) -> None:
        """Keep the memory of a tensor for the job's current stream after the tensor is
        gone: the job may have allocated it on another stream."""
        return

    def begin_iteration(self) -> None:
        """Use the training thread's current stream as `memory`.

        Set the clock of marks, which drifts, again.
        """
        return

    def sample_memory(self) -> None:
        """Record how much device memory the job uses now, for `free_bytes`. The
        training thread calls this."""
        return

    def free_bytes(self) -> float | None:
        """Return how much device memory state may use in total, in bytes.

        Return None if there is no limit.
        """

    @property
    def used_bytes(self) -> int:
        """Device memory in use by state and gradients, in bytes."""

    def close(self) -> None:
        """End the threads of the device."""
        return


def copy_now(
    device: Device, direction: Direction, pairs: list[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    """Copy each (source, target) over the link, and return when it is done."""
    device.wait(direction, [device.record("job")])
    device.copy(direction, pairs)
    device.record(direction).synchronize()
