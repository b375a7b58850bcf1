"""Chooses the backend of the job's version of torch."""

from collections.abc import Callable
from importlib import import_module
from typing import Any, Protocol

from ebbtide.features.dryrun.errors import DryRunError
from ebbtide.features.dryrun.gpu import FakedGpu
from ebbtide.features.dryrun.memory.call_stacks import CallStacks
from ebbtide.features.dryrun.peers import Peers
from ebbtide.features.dryrun.sink import Sink
from ebbtide.machines.machine import Machine

# Versions of torch, and the packages that know their private parts.
BACKENDS = {"2.13": "torch_2_13", "2.11": "torch_2_11"}


class Backend(Protocol):
    """Fakes the device in a version of torch, and reports what the job does to a sink.

    Attributes:
        torch_version: The version of torch, as torch states it.
        stacks: The call stacks that it has reported.
        mode, attention, batches, deepspeed, process_groups, user_files: Its parts, as
            in `torch_2_13`.
    """

    torch_version: str
    stacks: CallStacks
    mode: Any
    attention: Any
    batches: Any
    deepspeed: Any
    process_groups: Any
    user_files: Any

    def install(
        self,
        sink: Sink,
        gpu: FakedGpu,
        ranks: int | None,
        ranks_per_node: int | None,
        machine: Machine | None,
        peers: Peers | None,
    ) -> Callable[[], None]:
        """Fake the device of this process, and return a function that restores torch.

        Args:
            ranks: Ranks of the job; None: not stated.
            ranks_per_node: Ranks on one host; None: all of them.
            machine: The machine; None: not named.
            peers: The ranks that are run; None: rank 0 alone.
        """

    def storage_key(self, storage: Any) -> int:
        """Return the key of a storage in the sink."""

    def notes(self) -> list[str]:
        """Return lines for people on what was met in the job."""


def load_backend() -> Backend:
    """Return the backend of the torch that the job has.

    Raises:
        DryRunError: There is no torch, or its private parts are not known.
    """
    try:
        torch = import_module("torch")
    except ImportError as error:
        raise DryRunError(
            "a dry run needs torch 2.13, which `pip install 'ebbtide[dry-run]'` adds: "
            f"{error}"
        ) from error
    backend: Backend = backend_of(torch)()
    return backend


def backend_of(torch: Any) -> Any:
    """Return the class of the backend for a module `torch`."""
    version = torch.__version__
    if torch.version.hip:
        raise DryRunError(
            "a dry run needs a build of torch for the CPU or CUDA, as torch 2.13.0; "
            f"this is {version}"
        )
    folder = BACKENDS.get(".".join(version.split(".")[:2]))
    if folder is None:
        raise DryRunError(
            "a dry run needs torch 2.13 or 2.11, whose layout it knows; "
            f"this is {version}"
        )
    return import_module(f"ebbtide.features.dryrun.{folder}.backend").Backend
