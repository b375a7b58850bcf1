"""The files that a recorded process writes."""

from __future__ import annotations

import os
import time
from typing import Any

from .job_info import JobInfo
from .options import Options
from .spool import STOP_REASONS, STOPPED, Spool, process_name


class ProcessFiles:
    """The spool of this process image, the description of its job, and further files.

    A program that this process executes, and a forked child, have files of their own.

    Attributes:
        directory: The folder of the files.
        job_info: The description of the job.
        spool: The spool; None before `open`.
        opened_ns: The time of `open`, in ns of CLOCK_MONOTONIC; 0 before.
    """

    def __init__(self, torch: Any, directory: str, options: Options) -> None:
        self.job_info = JobInfo(torch, directory)
        self.spool: Spool | None = None
        self.directory = directory
        self.opened_ns = 0
        self._max_bytes = options.max_bytes
        self._name = ""

    def open(self) -> Spool:
        """Create the spool, and describe the process.

        Raises:
            OSError: If the spool cannot be created.
        """
        self.opened_ns = time.monotonic_ns()
        rank, world_size, local_rank = self.job_info.read_ranks()
        self._name = process_name(self.job_info.host)
        self.spool = Spool(os.path.join(self.directory, f"agent-{self._name}.spool"), self._max_bytes)
        self.spool.put_header(rank, world_size, local_rank)
        self.spool.flush()
        self.job_info.begin(self._name)
        return self.spool

    def path(self, name: str) -> str:
        """Return the path of a further file of this process."""
        return os.path.join(self.directory, f"{self._name}-{name}")

    def close(self, reason: str) -> None:
        """Write why the recording ends, one of `spool.STOP_REASONS`, and close the spool."""
        if self.spool is not None:
            self.spool.put(STOPPED, STOP_REASONS.index(reason), x=time.monotonic_ns())
            self.spool.close()
            self.job_info.write()

    def detach(self) -> None:
        """Leave the files to the parent, in a forked child."""
        if self.spool is not None:
            self.spool.detach()
