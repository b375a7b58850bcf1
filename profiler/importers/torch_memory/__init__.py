"""Imports memory snapshots of PyTorch."""

from ebbtide.profiler.importers.importer import Importer
from ebbtide.profiler.importers.torch_memory.snapshot import SnapshotImporter

IMPORTERS: tuple[Importer, ...] = (SnapshotImporter(),)
