"""Ranks of a job that send tensors to one another, such as the stages of a pipeline:
each is run by a process of its own."""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ebbtide.features.dryrun.record import RunRecord, load_record, save_record

# Ranks that are run: each takes the CPU time of a dry run.
MOST_PEERS = 8
_POLL_S = 0.002
# Of Python, before a dry run replaces it.
_open = open


class PeersNeeded(BaseException):
    """Raised, past a job's `except Exception`, where rank 0 alone cannot go on."""

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__()
        self.ranks = sorted(ranks)


class Peers:
    """The ranks that are run, and the messages of this one.

    A message is a file of `folder`; None: rank 0 is run alone until it needs others.

    Attributes:
        rank, ranks: This rank, and all that are run.
    """

    def __init__(
        self, rank: int = 0, ranks: Sequence[int] = (0,), folder: str | None = None
    ) -> None:
        self.rank, self.ranks, self._folder = rank, list(ranks), folder
        self._sent: Counter[int] = Counter()
        self._expected: Counter[int] = Counter()
        # Rank -> its process, until it has ended; of rank 0 alone.
        self._processes: dict[int, int] = {}

    def start(self) -> None:
        """Become a process for each of the ranks; the first one stays in this one."""
        for rank in self.ranks[1:]:
            sys.stdout.flush()
            process = os.fork()
            if not process:
                # PR_SET_PDEATHSIG: end when the first rank ends
                ctypes.CDLL(None).prctl(1, signal.SIGKILL)
                self.rank, self._processes = rank, {}
                return
            self._processes[rank] = process

    def meet(self, ranks: Sequence[int]) -> bool:
        """Return whether all of these ranks are run.

        Raises:
            PeersNeeded: They are not yet, and are few enough."""
        if set(ranks) <= set(self.ranks):
            return True
        if self._folder is None and self.rank in ranks and len(ranks) <= MOST_PEERS:
            raise PeersNeeded(ranks)
        return False

    def send(self, rank: int, content: Any) -> None:
        """Send a message."""
        path = self._path(self.rank, rank, self._sent[rank])
        self._sent[rank] += 1
        with _open(path, "wb") as file:
            file.write(pickle.dumps(content))

    def expect(self, rank: int) -> int:
        """Return the number of the next message of a rank."""
        self._expected[rank] += 1
        return self._expected[rank] - 1

    def receive(self, rank: int, number: int) -> Any:
        """Wait for a message; None: the rank has ended without it."""
        path = self._path(rank, self.rank, number)
        while True:
            has_ended = os.access(self._end(rank), os.F_OK)
            try:
                with _open(path, "rb") as file:
                    return pickle.load(file)
            except (FileNotFoundError, EOFError, pickle.UnpicklingError):
                # It may be written just now.
                if has_ended:
                    return None
            self._check(os.WNOHANG)
            time.sleep(_POLL_S)

    def finish(self, record: RunRecord, job: list[str]) -> RunRecord:
        """Return the record of rank 0 with those of the others, once these have ended;
        a process of another rank ends.

        Raises:
            SystemExit: With the status of a rank that has failed."""
        if self._folder is None:
            return record
        if self.rank != self.ranks[0]:
            save_record(record, job, 0, Path(self._record(self.rank)))
        _open(self._end(self.rank), "wb").close()
        if self.rank != self.ranks[0]:
            sys.exit()
        while self._processes:
            self._check(0)
        paths = [Path(self._record(rank)) for rank in self.ranks[1:]]
        return replace(record, peers=[load_record(path)[0] for path in paths])

    def _check(self, options: int) -> None:
        """End with the status of a rank that has failed."""
        for rank, process in list(self._processes.items()):
            ended, status = os.waitpid(process, options)
            if ended:
                del self._processes[rank]
                if status:
                    sys.exit(abs(os.waitstatus_to_exitcode(status)))

    def _path(self, source: int, target: int, number: int) -> str:
        return f"{self._folder}/{source}-{target}-{number}"

    def _end(self, rank: int) -> str:
        return f"{self._folder}/{rank}-ended"

    def _record(self, rank: int) -> str:
        return f"{self._folder}/{rank}-record"
