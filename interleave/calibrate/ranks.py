"""The processes that measure at the same time, one for each rank of a job."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from ebbtide.errors import MachineError

# Starting a process imports torch, and allocating takes its time: longer than this no rank keeps the others waiting.
_PATIENCE_S = 300.0
_FAILED = "failed"
# What torchrun and DeepSpeed's launcher tell each process.
_LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Ranks:
    """One of `count` ranks; alone unless told otherwise. local_count: the ranks of this host. store: one of
    torch.distributed's, shared by all. helpers: processes that this one started."""

    def __init__(
        self, rank: int = 0, count: int = 1, local_rank: int = 0, local_count: int = 1, store: Any = None
    ) -> None:
        self.rank = rank
        self.count = count
        self.local_rank = local_rank
        self.local_count = local_count
        self.helpers: list[BaseProcess] = []
        self._store = store
        self._met = 0

    def wait(self) -> None:
        """Go on when all ranks have come here. Raises MachineError where one has failed."""
        if self.count == 1:
            return
        self._met += 1
        if self._store.add(f"here-{self._met}", 1) == self.count:
            self._store.set(f"go-{self._met}", "")
        self._for(f"go-{self._met}")

    def gather(self, mine: dict[str, float]) -> list[dict[str, float]]:
        """What each rank found, in their order. Raises MachineError where one has failed."""
        if self.count == 1:
            return [mine]
        self._store.set(f"found-{self.rank}", json.dumps(mine))
        return [json.loads(self._for(f"found-{rank}")) for rank in range(self.count)]

    def fail(self, why: str) -> None:
        """Tell the others that this rank cannot go on."""
        if self.count > 1:
            self._store.set(_FAILED, f"rank {self.rank}: {why}")

    def _for(self, key: str) -> bytes:
        """The value of a key, as soon as it is set."""
        patience = time.monotonic() + _PATIENCE_S
        while True:
            try:
                self._store.wait([key], timedelta(seconds=1))
            except RuntimeError:  # it is not set yet
                self._complain(time.monotonic() > patience)
            else:
                value: bytes = self._store.get(key)
                return value

    def _complain(self, late: bool) -> None:
        if self._store.check([_FAILED]):
            raise MachineError(self._store.get(_FAILED).decode())
        if any(helper.exitcode not in (None, 0) for helper in self.helpers):
            raise MachineError(f"one of {self.count} ranks was killed: is there memory for so many? try fewer --ranks")
        if late:
            raise MachineError(f"one of {self.count} ranks does not answer any more")


@contextlib.contextmanager
def ranks_of(count: int | None, work: Callable[[Ranks], object]) -> Iterator[Ranks]:
    """This process's place among the ranks of its launcher, or among `count` processes of this host: the others are
    started here and do `work`. Raises MachineError for a count under a launcher."""
    launched = all(name in os.environ for name in _LAUNCHED) and os.environ["WORLD_SIZE"] != "1"
    if launched and count is not None:
        raise MachineError("--ranks starts ranks, and a launcher has started some already: use one of them")
    if launched:
        yield _of_launcher()
    elif count is None or count == 1:
        yield Ranks()
    else:
        with _started(count, work) as ranks:
            yield ranks


def _of_launcher() -> Ranks:
    from torch.distributed import rendezvous

    store, rank, count = next(iter(rendezvous("env://")))
    return Ranks(rank, count, int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]), store)


@contextlib.contextmanager
def _started(count: int, work: Callable[[Ranks], object]) -> Iterator[Ranks]:
    import torch

    if 0 < torch.cuda.device_count() < count:
        raise MachineError(f"--ranks is {count}, and each rank needs one of the {torch.cuda.device_count()} GPUs here")
    # A process with threads must not be forked, and CUDA does not survive it.
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="ebbtide-") as folder:
        file = Path(folder) / "store"
        helpers = [spawn.Process(target=_help, args=(work, file, rank, count), daemon=True) for rank in range(1, count)]
        try:
            for helper in helpers:
                helper.start()
            ranks = _of_file(file, 0, count)
            ranks.helpers = list(helpers)
            yield ranks
        finally:
            for helper in helpers:
                if helper.pid is not None:
                    helper.terminate()
                    helper.join()


def _of_file(file: Path, rank: int, count: int) -> Ranks:
    from torch.distributed import FileStore

    return Ranks(rank, count, rank, count, FileStore(str(file), count))


def _help(work: Callable[[Ranks], object], file: Path, rank: int, count: int) -> None:
    # Ctrl-C reaches all processes of the terminal: the first rank ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ranks = _of_file(file, rank, count)
    try:
        work(ranks)
    except Exception as error:
        ranks.fail(str(error) or type(error).__name__)
