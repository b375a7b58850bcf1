"""Follows all spools of a recording."""

import os
from pathlib import Path
from typing import Any

import numpy as np

from ebbtide.features.live.recording.sampled_figures import SamplerTail
from ebbtide.profiler.recording.spools.devices import device_names
from ebbtide.profiler.recording.spools.process_tail import PhaseCounts, ProcessTail
from ebbtide.profiler.recording.spools.records import RECORD
from ebbtide.profiler.recording.spools.recovery import read_process, trace_of
from ebbtide.profiler.recording.spools.trainings import group_trainings
from ebbtide.profiler.trace.schema import SPOOL
from ebbtide.profiler.trace.trace import Trace

# A look at a long recording reads it in such pieces, and this many of them before it
# returns.
_PIECE_BYTES = 1 << 23
_PIECES = 8


class RecordingTail:
    """The last `iterations` of each of a recording's processes, and counts since it
    began.

    The spools are read as far as they were written; nothing is locked or written.
    `behind`: whether there is more than the last call of `poll` has read."""

    def __init__(self, path: Path, meta: dict[str, Any], iterations: int) -> None:
        self.path = path
        self.meta = meta
        self.processes: dict[str, ProcessTail] = {}
        self.behind = False
        self._iterations = iterations
        self._samplers: dict[str, SamplerTail] = {}
        gpus = meta["host"].get("gpus") or []
        links = {
            gpu["index"]: link
            for gpu in gpus
            if "index" in gpu and isinstance(link := gpu.get("link"), dict)
        }
        peaks = {index: link.get("peak_bytes_per_s") for index, link in links.items()}
        self._peaks = {index: peak for index, peak in peaks.items() if peak is not None}
        # Of the training that `trace` returned last: rank -> its process and NVML's
        # number of its device.
        self._ranks: dict[int, tuple[ProcessTail, int | None]] = {}

    def poll(self) -> bool:
        """Read what the spools have gained, at most 64 MiB of each.

        Return whether that was anything; see `behind`.
        """
        self._discover()
        changed = False
        tails: list[ProcessTail | SamplerTail] = [
            *self.processes.values(),
            *self._samplers.values(),
        ]
        for tail in tails:
            for _ in range(_PIECES):
                changed |= tail.poll(_PIECE_BYTES) > 0
                if not tail.spool.behind:
                    break
        self.behind = any(tail.spool.behind for tail in tails)
        begins = [
            ns
            for tail in self.processes.values()
            if (ns := tail.window_start_ns) is not None
        ]
        for sampler in self._samplers.values():
            if begins:
                sampler.trim(min(begins))
        return changed

    def trace(self) -> Trace | None:
        """Return the training that began last, with the iterations that are kept,
        without copies and allocations; None if no process has begun.

        Where iterations were dropped, the first that was kept is warm-up: its start is
        known by the host's clock alone."""
        samples = [sampler.records for sampler in self._samplers.values()]
        all_samples = np.concatenate(samples) if samples else np.empty(0, RECORD)
        of_process: dict[int, ProcessTail] = {}
        data = []
        for tail in self.processes.values():
            if tail.spool.header is not None:
                process = read_process(
                    tail.spool.path,
                    tail.window(),
                    all_samples,
                    self.meta,
                    with_files=False,
                )
                of_process[id(process)] = tail
                data.append(process)
        trainings = group_trainings(data)
        if not trainings:
            return None
        training = trainings[-1]
        gpus = self.meta["host"].get("gpus") or []
        self._ranks = {}
        for process in training.ranks:
            names = device_names(process.meta["devices"][:1], gpus)
            self._ranks[process.meta["rank"]] = (
                of_process[id(process)],
                next(iter(names), None),
            )
        return trace_of(self.path, self._meta_of_window(), training)

    @property
    def ranks(self) -> dict[int, ProcessTail]:
        """The process of each rank of the training that `trace` returned last."""
        return {rank: tail for rank, (tail, _) in self._ranks.items()}

    def counts(self, rank: int) -> PhaseCounts:
        """Return the times of phases of a rank since the recording began."""
        return self._ranks[rank][0].counts()

    def link_bytes(self, rank: int) -> dict[str, int] | None:
        """Return the bytes that the link of a rank's first device moved per direction
        so far; None: not sampled."""
        device = self._ranks[rank][1]
        sampled = (
            [sampler.link_bytes(device) for sampler in self._samplers.values()]
            if device is not None
            else []
        )
        return next((moved for moved in sampled if moved is not None), None)

    def _meta_of_window(self) -> dict[str, Any]:
        dropped = max(
            (tail.dropped.iterations for tail, _ in self._ranks.values()), default=0
        )
        if not dropped:
            return self.meta
        remaining = (self.meta.get("warmup_iterations") or 0) - dropped
        return {**self.meta, "warmup_iterations": max(1, remaining)}

    def _discover(self) -> None:
        try:
            names = sorted(os.listdir(self.path / SPOOL))
        except OSError:
            return
        for name in names:
            if not name.endswith(".spool"):
                continue
            if name.startswith("agent-") and name not in self.processes:
                self.processes[name] = ProcessTail(
                    self.path / SPOOL / name, self._iterations
                )
            elif name.startswith("sampler-") and name not in self._samplers:
                self._samplers[name] = SamplerTail(
                    self.path / SPOOL / name, self._peaks
                )
