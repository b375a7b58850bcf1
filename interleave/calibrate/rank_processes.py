"""Starts the processes that measure at the same time, or joins those of a launcher."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

from ebbtide import host_limits
from ebbtide.errors import MachineError
from ebbtide.interleave.calibrate.ranks import Ranks

# Set by torchrun and DeepSpeed's launcher in each process.
_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@contextlib.contextmanager
def join_ranks(count: int | None, work: Callable[[Ranks], object]) -> Iterator[Ranks]:
    """Join the ranks of a launcher, or start `count - 1` further processes on this host that call `work`.

    Args:
        count: Number of ranks to run on this host; None for a single rank or those of the launcher.
        work: Called with its `Ranks` in each process started here; must be picklable.

    Raises:
        MachineError: A count was given under a launcher, there are too few GPUs, or a rank failed.
    """
    launched = all(name in os.environ for name in _LAUNCHER_VARIABLES) and os.environ["WORLD_SIZE"] != "1"
    if launched and count is not None:
        raise MachineError("--ranks starts ranks, but a launcher has started some already: use only one of them")
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
    return Ranks(rank, count, int(os.environ["LOCAL_RANK"]), host_limits.local_ranks(), store)


@contextlib.contextmanager
def _started_ranks(count: int, work: Callable[[Ranks], object]) -> Iterator[Ranks]:
    import torch

    if 0 < torch.cuda.device_count() < count:
        raise MachineError(f"--ranks is {count}, but each rank needs one of the {torch.cuda.device_count()} GPUs here")
    # A process with threads must not be forked, and CUDA does not survive a fork.
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="ebbtide-") as folder:
        file = Path(folder) / "store"
        helpers = tuple(
            spawn.Process(target=_run_helper, args=(work, file, rank, count), daemon=True) for rank in range(1, count)
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


def _local_ranks(file: Path, rank: int, count: int, helpers: tuple[BaseProcess, ...] = ()) -> Ranks:
    from torch.distributed import FileStore

    return Ranks(rank, count, rank, count, FileStore(str(file), count), helpers)


def _run_helper(work: Callable[[Ranks], object], file: Path, rank: int, count: int) -> None:
    # Ctrl-C reaches all processes of the terminal; the first rank ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with _local_ranks(file, rank, count).joined() as ranks:
            work(ranks)
    except Exception:
        # Rank 0 reports the error; a traceback of this process would only add noise.
        sys.exit(1)
