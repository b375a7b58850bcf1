"""Imports memory snapshots of PyTorch."""

from ebbtide.features.importers.importer import Importer
from ebbtide.features.importers.torch_memory.snapshot import SnapshotImporter

IMPORTERS: tuple[Importer, ...] = (SnapshotImporter(),)
