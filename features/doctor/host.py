"""The host that checks look at: its cards, its limits, and the environment of a job."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ebbtide import host_limits
from ebbtide.features.doctor.job import JobCommand, read_job
from ebbtide.numa.topology import (
    NumaNode,
    pci_node,
    read_allowed_cpus,
    read_nodes,
    read_text,
)
from ebbtide.profiler.sampler.gpu import Gpu, open_gpus
from ebbtide.profiler.sampler.nvml import Nvml, NvmlError

# Prints versions and files of packages, without importing them.
_PROBE = """
import importlib.metadata as metadata, importlib.util as util, json
facts = {}
for name in ("torch", "deepspeed", "ninja"):
    try:
        spec = util.find_spec(name)
        facts[name] = {"version": metadata.version(name), "file": spec and spec.origin}
    except (ImportError, ValueError):
        facts[name] = None
print(json.dumps(facts))
"""
_PROBE_S = 10


@dataclass(frozen=True)
class Card:
    """A GPU, or a MIG device; None: the driver does not tell."""

    device: Mapping[str, Any]  # Its description, as the metadata of a trace has it.
    node: int | None  # The NUMA node that it is attached to.
    # Why PCIe says nothing about its copies; None where they go over PCIe.
    obstacle: str | None

    @property
    def title(self) -> str:
        """Its number and name."""
        return f"GPU {self.device['index']} ({self.device['name'] or 'no name'})"


@dataclass(frozen=True)
class Package:
    """An installed package of the job's Python; `file` is its module's."""

    version: str
    file: Path | None


@dataclass(frozen=True)
class JobHost:
    """A host and the job that is to run on it."""

    job: JobCommand  # The job, which has no words where none was named.
    cards: tuple[Card, ...] = ()  # The GPUs that the job may use, in its order.
    # Why there are none, or not all; empty where all were read.
    missing_cards: str = ""
    driver: str | None = None  # Version of the driver; None: not known.
    # Newest CUDA that it runs, as in (12, 8); None: not known.
    driver_cuda: tuple[int, int] | None = None
    folder: Path = field(default_factory=Path.cwd)  # The folder that the job starts in.
    root: Path = Path("/")  # The folder that holds `sys` and `proc`.

    @property
    def ranks(self) -> int:
        """Ranks of the job on this host: the launcher's, else one for each card."""
        return self.job.ranks or max(1, len(self.cards))

    @cached_property
    def cpus(self) -> frozenset[int]:
        """The logical cores that this process, and what it starts, may use."""
        return read_allowed_cpus("self", self.root) or frozenset()

    @cached_property
    def cores(self) -> int:
        """The number of logical cores that quotas of control groups leave of `cpus`."""
        return host_limits.within_quotas(len(self.cpus), self.root)

    @property
    def rank_cores(self) -> int:
        """The logical cores of each rank."""
        return max(1, self.cores // self.ranks)

    @cached_property
    def nodes(self) -> tuple[NumaNode, ...]:
        """The NUMA nodes with cores."""
        return tuple(node for node in read_nodes(self.root) if node.cpus)

    @cached_property
    def packages(self) -> dict[str, Package | None]:
        """Packages of the job's Python: torch, deepspeed, ninja.

        There are none where it cannot be asked.
        """
        command = [self.job.python or sys.executable, "-c", _PROBE]
        try:
            run = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=_PROBE_S,
                env=dict(self.job.environment),
                check=True,
            )
            facts = json.loads(run.stdout)
        except (OSError, ValueError, subprocess.SubprocessError):
            return {}
        return {
            name: Package(fact["version"], Path(fact["file"]) if fact["file"] else None)
            if fact
            else None
            for name, fact in facts.items()
        }

    def text(self, path: str) -> str:
        """Return the content of a file of /proc or /sys; empty where there is none."""
        return read_text(self.root / path) or ""


def this_host(
    command: Sequence[str] = (), root: Path = Path("/"), library: Any = None
) -> JobHost:
    """Return this host, with the job that a command starts, if one is named.

    `root` is the folder that holds `sys` and `proc`, `library` the module `pynvml` or a
    replacement."""
    job = read_job(command, os.environ)
    try:
        nvml = Nvml(library)
    except NvmlError as error:
        return JobHost(
            job, missing_cards=f"no GPU can be seen (NVML: {error})", root=root
        )
    try:
        opened = open_gpus(nvml, job.environment.get("CUDA_VISIBLE_DEVICES", ""))
        cards = tuple(_card(gpu, root) for gpu in opened.gpus)
        missing = "; ".join(opened.unavailable) or (
            "" if cards else "NVML knows no GPU"
        )
        return JobHost(
            job,
            _visible(cards, job.environment),
            missing,
            nvml.driver(),
            _driver_cuda(nvml),
            root=root,
        )
    finally:
        nvml.close()


def _card(gpu: Gpu, root: Path) -> Card:
    device = gpu.describe()
    return Card(device, pci_node(device["pci_bus_id"], root), gpu.link_obstacle())


def _visible(
    cards: tuple[Card, ...], environment: Mapping[str, str]
) -> tuple[Card, ...]:
    """Return the cards that CUDA_VISIBLE_DEVICES names by number or UUID, in its order.

    Return all where it is not set.
    """
    names = environment.get("CUDA_VISIBLE_DEVICES")
    if names is None:
        return cards
    chosen = []
    for name in map(str.strip, names.split(",")):
        card = next(
            (
                one
                for one in cards
                if name in (str(one.device["index"]), one.device["uuid"])
            ),
            None,
        )
        if card is None:
            break  # CUDA ends the list at the first name that it does not know
        chosen.append(card)
    return tuple(chosen)


def _driver_cuda(nvml: Nvml) -> tuple[int, int] | None:
    try:
        number = int(nvml.call("nvmlSystemGetCudaDriverVersion"))
    except NvmlError:
        return None
    return number // 1000, number % 1000 // 10
