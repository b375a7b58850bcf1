"""Connects the ranks that measure at the same time, which a launcher or this process
starts."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from ebbtide import host_limits
from ebbtide.errors import MachineError

# A rank imports torch and allocates within this time. If one does not, all others stop.
_TIMEOUT_S = 300.0
# A connection breaks before the operating system reports the end of the process.
_REAP_S = 2.0
_FAILURE_KEY = "failure"


class _PeerLostError(MachineError):
    """Another rank failed, was killed, or does not answer."""


@dataclass(frozen=True)
class Ranks:
    """This process as one of several ranks; a single rank by default."""

    rank: int = 0
    count: int = 1
    local_rank: int = 0
    local_count: int = 1
    store: Any = None  # A store of torch.distributed, which the ranks share.
    # Processes of other ranks that this process has started.
    helpers: tuple[BaseProcess, ...] = ()

    def wait(self) -> None:
        """Wait until all ranks have called this."""
        if self.count > 1:
            from torch import distributed

            with self._peers():
                distributed.barrier()

    def gather(self, rates: dict[str, float]) -> list[dict[str, float]]:
        """Exchange the rates of all ranks and return them in the order of the ranks."""
        if self.count == 1:
            return [rates]
        from torch import distributed

        gathered: list[Any] = [None] * self.count
        with self._peers():
            distributed.all_gather_object(gathered, rates)
        return gathered

    @contextlib.contextmanager
    def joined(self) -> Iterator[Ranks]:
        """Connect to the other ranks by gloo for the block.

        Report an error of the block to them.

        Like `wait` and `gather` it raises MachineError where another rank failed, was
        killed, or does not answer."""
        from torch import distributed

        with self._peers():
            self._wait_for_start()
            timeout = timedelta(seconds=_TIMEOUT_S)
            distributed.init_process_group(
                "gloo",
                store=self.store,
                rank=self.rank,
                world_size=self.count,
                timeout=timeout,
            )
        try:
            yield self
        except _PeerLostError:
            raise
        except Exception as error:
            self.store.set(
                _FAILURE_KEY, f"rank {self.rank}: {str(error) or type(error).__name__}"
            )
            raise
        finally:
            distributed.destroy_process_group()

    def _wait_for_start(self) -> None:
        """Wait until all ranks have started.

        Gloo would not notice a rank that was killed before it connects.
        """
        self.store.set(f"started-{self.rank}", "")
        keys = [f"started-{rank}" for rank in range(self.count)]
        deadline = time.monotonic() + _TIMEOUT_S
        while not self.store.check(keys):
            if self._has_dead_helper() or time.monotonic() > deadline:
                raise RuntimeError("a rank has not started")
            time.sleep(0.05)

    @contextlib.contextmanager
    def _peers(self) -> Iterator[None]:
        """Turn an error of gloo or of the store into one line."""
        try:
            yield
        except RuntimeError as error:
            raise _PeerLostError(self._reason()) from error

    def _reason(self) -> str:
        deadline = time.monotonic() + _REAP_S
        while time.monotonic() < deadline:
            # The store may have ended with the rank that held it.
            with contextlib.suppress(RuntimeError):
                if self.store.check([_FAILURE_KEY]):
                    return str(self.store.get(_FAILURE_KEY).decode())
            if self._has_dead_helper():
                return (
                    f"one of {self.count} ranks was killed: is there memory for so "
                    "many? try fewer --ranks"
                )
            time.sleep(0.05)
        return (
            f"one of {self.count} ranks has ended, or did not answer for "
            f"{_TIMEOUT_S:g} s"
        )

    def _has_dead_helper(self) -> bool:
        return any(helper.exitcode not in (None, 0) for helper in self.helpers)


# Set by torchrun and DeepSpeed's launcher in each process.
_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@contextlib.contextmanager
def join_ranks(count: int | None, work: Callable[[Ranks], object]) -> Iterator[Ranks]:
    """Join the ranks of a launcher, or start `count - 1` further processes here that
    call `work` (picklable)."""
    launched = (
        all(name in os.environ for name in _LAUNCHER_VARIABLES)
        and os.environ["WORLD_SIZE"] != "1"
    )
    if launched and count is not None:
        raise MachineError(
            "--ranks starts ranks, but a launcher has started some already: use only "
            "one of them"
        )
    if launched:
        with _launched_ranks().joined() as ranks:
            yield ranks
    elif count is None or count == 1:
        yield Ranks()
    else:
        with _started_ranks(count, work) as ranks:
            yield ranks


def _launched_ranks() -> Ranks:
    from torch.distributed import rendezvous

    store, rank, count = next(iter(rendezvous("env://")))
    return Ranks(
        rank, count, int(os.environ["LOCAL_RANK"]), host_limits.local_ranks(), store
    )


@contextlib.contextmanager
def _started_ranks(count: int, work: Callable[[Ranks], object]) -> Iterator[Ranks]:
    import torch

    if 0 < torch.cuda.device_count() < count:
        raise MachineError(
            f"--ranks is {count}, but each rank needs one of the "
            f"{torch.cuda.device_count()} GPUs here"
        )
    # A process with threads must not be forked, and CUDA does not survive a fork.
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="ebbtide-") as folder:
        file = Path(folder) / "store"
        helpers = tuple(
            spawn.Process(
                target=_run_helper, args=(work, file, rank, count), daemon=True
            )
            for rank in range(1, count)
        )
        try:
            for helper in helpers:
                helper.start()
            with _local_ranks(file, 0, count, helpers).joined() as ranks:
                yield ranks
        finally:
            for helper in helpers:
                if helper.pid is not None:
                    helper.terminate()
                    helper.join()


def _local_ranks(
    file: Path, rank: int, count: int, helpers: tuple[BaseProcess, ...] = ()
) -> Ranks:
    from torch.distributed import FileStore

    return Ranks(rank, count, rank, count, FileStore(str(file), count), helpers)


def _run_helper(
    work: Callable[[Ranks], object], file: Path, rank: int, count: int
) -> None:
    # Ctrl-C reaches all processes of the terminal; the first rank ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with _local_ranks(file, rank, count).joined() as ranks:
            work(ranks)
    except Exception:
        # Rank 0 reports the error; a traceback of this process would only add noise.
        sys.exit(1)
