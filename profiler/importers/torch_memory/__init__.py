"""Imports memory snapshots and memory timelines of PyTorch."""

from ebbtide.profiler.importers.importer import Importer
from ebbtide.profiler.importers.torch_memory.snapshot import SnapshotImporter, TimelineImporter

IMPORTERS: tuple[Importer, ...] = (SnapshotImporter(), TimelineImporter())
