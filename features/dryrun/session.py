"""A dry run inside a process: installs everything, and removes it again."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from ebbtide.features.dryrun.backends import load_backend
from ebbtide.features.dryrun.errors import DryRunError, DryRunFinished
from ebbtide.features.dryrun.failures import WAKE
from ebbtide.features.dryrun.gpu import (
    DEFAULT_CAPACITY_BYTES,
    FakedGpu,
    capability_of,
)
from ebbtide.features.dryrun.memory.caching_allocator import (
    CachingAllocator,
    context_bytes,
    device_allocator,
)
from ebbtide.features.dryrun.memory.device_memory import is_trial
from ebbtide.features.dryrun.memory.reserved_range import reserved_range
from ebbtide.features.dryrun.peers import Peers
from ebbtide.features.dryrun.record import RunRecord
from ebbtide.features.dryrun.sink import Sink
from ebbtide.machines.catalog import MachineArgument, find_machine
from ebbtide.machines.machine import Machine, unified_memory_text
from ebbtide.profiler.agent.inventory import list_blocks
from ebbtide.profiler.agent.job_info import (
    describe_framework,
    describe_model,
    describe_optimizers,
)
from ebbtide.profiler.agent.named_ranges import LISTENERS
from ebbtide.units import ByteCount, byte_count

# Iterations after which a job is ended in which no optimizer steps.
LEAST_UNSTEPPED = 8


@dataclass(frozen=True)
class DryRunOptions:
    """Options of a dry run.

    Attributes:
        iterations: Iterations after which the job is ended.
        capacity_bytes: Memory of the device; None: not stated.
        machine: The machine, its file or its name, for its rates and its compute
            capability; None: not named.
        ranks: Ranks of the job, whose rank 0 is run; None: not stated, and process
            groups have one rank.
        ranks_per_node: Ranks on one host; None: all of them.
        peers: The ranks that are run, of which this is one; None: rank 0 alone.
    """

    iterations: int = 2
    capacity_bytes: ByteCount | None = None
    device_name: str = "dry run"
    machine: MachineArgument | None = None
    ranks: int | None = None
    ranks_per_node: int | None = None
    peers: Peers | None = None


class DryRun:
    """A context in which CUDA tensors of this process are fake, and what they do is
    counted.

    Leaving it restores torch. Tensors made inside must not be used afterwards.

    Attributes:
        clock, memory, host_memory: The times and the bytes that were counted.
        stacks, mode, tracker: How they were counted.
        attention, deepspeed, user_files: The use of these.
        machine, capacity_bytes: Of the options.
        model, optimizers: Descriptions of the job's model and optimizers, as in
            meta.json.
        finished: Whether all iterations were reached.

    Raises:
        DryRunError: This build of torch cannot be faked, or the job cannot get to its
            end.
    """

    def __init__(self, options: DryRunOptions | None = None) -> None:
        self.options = options or DryRunOptions()
        capacity, machine = self.options.capacity_bytes, self.options.machine
        self.capacity_bytes = (
            None if capacity is None else int(byte_count(capacity, "capacity_bytes"))
        )
        self.machine = machine = None if machine is None else find_machine(machine)
        name = self.options.device_name
        self.gpu = FakedGpu(
            name,
            capability_of(name, machine.gpu if machine is not None else None),
            self.capacity_bytes or DEFAULT_CAPACITY_BYTES,
        )
        self.context_bytes = context_bytes(self.gpu.multiprocessors.count)
        self.sink = Sink(
            machine, self._new_allocator, self._classify, self._end_iteration
        )
        self.clock, self.tracker = self.sink.clock, self.sink.phases
        self.memory, self.host_memory = self.sink.memory, self.sink.host_memory
        # Peaks of reserved memory before the iterations with the longest batch, by the
        # device.
        self._natural_bytes: dict[int, int] = {}
        self.model: dict[str, Any] = {}
        self.framework: dict[str, Any] = {}
        self.optimizers: list[dict[str, Any]] = []
        self.finished = False
        self._process = os.getpid()

    def __enter__(self) -> DryRun:
        self.backend = backend = load_backend()
        options = self.options
        self._uninstall = self.backend.install(
            self.sink,
            self.gpu,
            options.ranks,
            options.ranks_per_node,
            self.machine,
            options.peers,
        )
        self.stacks, self.mode, self.batches = (
            backend.stacks,
            backend.mode,
            backend.batches,
        )
        self.attention, self.deepspeed = backend.attention, backend.deepspeed
        self.user_files, self.process_groups = (
            backend.user_files,
            backend.process_groups,
        )
        LISTENERS.append(self.tracker.begin_mark)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        LISTENERS.remove(self.tracker.begin_mark)
        self._freeze()
        self._uninstall()
        if isinstance(error, DryRunFinished) and error.args:
            raise DryRunError(*error.args) from error
        return isinstance(error, DryRunFinished)

    def record(self) -> RunRecord:
        """Return what was counted, once the context was left."""
        described = {
            "model": self.model,
            "optimizers": self.optimizers,
            "framework": self.framework,
        }
        return RunRecord(
            machine=self.machine,
            device_name=self.options.device_name,
            capacity_bytes=self.capacity_bytes,
            ranks=self.process_groups.ranks,
            iterations=self.tracker.iterations,
            finished=self.finished,
            versions={
                "python": sys.version.split()[0],
                "torch": self.backend.torch_version,
            },
            # In it are objects of torch, such as its version.
            description=json.loads(json.dumps(described)) if self.model else {},
            assumptions=self.clock.assumptions(),
            prediction={
                "context_bytes": self.context_bytes,
                "reserved_bytes": list(self.reserved_range()),
                "batches": self.batches.seen,
                "host_bytes": self.host_use(),
                "bounds": dict(self.mode.shapes.bounds.most_common()),
            },
            deepspeed=json.loads(json.dumps(self.deepspeed.description)),
            phases=self.tracker.phases,
            without_gradients=self.tracker.without_gradients.rows,
            marks=self.tracker.marks,
            kernels=self.clock.kernels,
            copies=self.clock.copies,
            memory={
                number: self.memory.use(number).timeline
                for number in self.memory.by_size()
            },
            host_memory=self.host_memory.timeline,
            blocks=self.memory.blocks,
            stacks=self.stacks.texts,
            notes=self.notes(),
            rank=self.options.peers.rank if self.options.peers else 0,
        )

    def reserved_range(self) -> tuple[int, int]:
        """Return the least and the largest peak of reserved memory of the fullest
        device, in bytes: batches and workspaces may vary."""
        ranges = map(self._range_of_device, self.memory.by_size())
        least, most = zip(*ranges, strict=True)
        return max(least), max(most)

    def _range_of_device(self, device: int) -> tuple[int, int]:
        memory = self.memory
        most = memory.use(device).most_reserved_bytes
        least = self._natural_bytes.get(device, most)
        blocks, convolutions = (
            [block for block in each if block.device == device]
            for each in (memory.blocks, memory.convolutions)
        )
        if not convolutions:
            return least, most
        allocators = self._new_allocator(), self._new_allocator()
        low, high = reserved_range(blocks, convolutions, allocators)
        return min(low, least), max(high, most)

    def host_use(self) -> dict[str, tuple[int, float | None]]:
        """Return the most host memory of the rank and its limit (None: not known), of
        all and of pinned memory."""
        ranks, machine = self.process_groups.ranks_per_node, self.machine
        divisible = machine is not None and (machine.box is not None or ranks == 1)
        own = (
            machine.for_ranks(ranks) if machine is not None and divisible else Machine()
        )
        most, pinned = self.host_memory.most_bytes, self.host_memory.most_pinned_bytes
        return {
            "all": (most, own.host_memory_bytes),
            "pinned": (pinned, own.pinned_memory_bytes),
        }

    def notes(self) -> list[str]:
        """Return lines for people: what is predicted, what is assumed, and what was met
        in the job."""
        notes = [
            "predicted by a dry run: the job ran without a GPU, on tensors without "
            "values",
            "times are predicted from FLOPs, bytes and launches at stated "
            "efficiencies, under fast, typical and slow "
            f"assumptions: {'; '.join(self.clock.assumptions().values())}",
        ]
        notes += self.process_groups.notes(self.clock.rates.gpu.peer_bytes_per_s)
        notes.append(
            "beside the pools, a GPU holds the CUDA context (about "
            f"{self.context_bytes / 1e9:.2f} GB, which the "
            "verdict keeps free), and buffers of NCCL where there are several ranks "
            "(0.2 GB and more)"
        )
        if self.machine is not None and self.machine.unified_memory:
            notes.append(unified_memory_text(self.machine) or "")
        notes += self.memory.allocator.notes()
        if failures := self.memory.failures:
            notes.append(
                f"memory ran out {failures:,} times, which the job catches: it goes on "
                "with less, or without"
            )
        notes += self.host_memory.notes()
        notes += self.backend.notes()
        finished = self.tracker.iterations
        if not finished:
            notes.append("no optimizer of torch stepped: there are no iterations")
        elif self.tracker.rule.index < 0:
            notes.append(
                "no optimizer of torch stepped: an iteration ends before the forward "
                f"that follows a backward; {finished} were run"
            )
        elif not self.finished:
            notes.append(
                f"the job ended by itself after {finished} of "
                f"{self.options.iterations} iterations"
            )
        elif names := self.tracker.end.left_out:
            notes.append(
                f"optimizers that did not step in {finished} iterations, whose state "
                f"is not counted: {', '.join(names)}"
            )
        return notes

    def _new_allocator(self) -> CachingAllocator:
        return device_allocator(self.capacity_bytes, self.context_bytes)

    def _classify(self) -> None:
        """Note which storages hold parameters, buffers, gradients and optimizer
        state."""
        modules, optimizers = list(self.tracker.modules), list(self.tracker.optimizers)
        with self.tracker.threads.quiet() as quiet:
            if quiet:
                blocks = list_blocks(modules, optimizers, self.backend.storage_key)
                self.memory.set_categories(blocks)

    def _end_iteration(self, finished: int) -> None:
        if os.getpid() != self._process:
            os.kill(self._process, WAKE)
            os._exit(0)
        optimizers = self.tracker.rule.optimizers
        modules = list(self.tracker.modules)
        self.model = describe_model(modules, optimizers, self.tracker.recomputes)
        self.framework = self.framework or describe_framework(
            modules, self.tracker.batch
        )
        self.optimizers = describe_optimizers(optimizers)
        self.mode.values.reads = 0
        if finished >= self._wanted_iterations() and not is_trial():
            if self.tracker.end.waits(len(self.clock.kernels), self.options.iterations):
                return
            self._natural_bytes = self._natural_bytes or {
                number: use.most_reserved_bytes
                for number, use in self.memory.uses.items()
            }
            if self.batches.needs_longest():
                return
            self.finished = True
            self._freeze()
            raise DryRunFinished

    def _wanted_iterations(self) -> int:
        """Return the iterations after which the job is ended: more where no optimizer
        has stepped, since it may accumulate gradients."""
        wanted = self.options.iterations
        return wanted if self.tracker.iterations else max(wanted, LEAST_UNSTEPPED)

    def _freeze(self) -> None:
        """Count nothing any more: frameworks move and save tensors when they end."""
        if self.tracker.live:
            self._classify()
            self.tracker.number_unstepped()
        self.tracker.live = False
        self.clock.closed = True
        self.user_files.stop_listing()
