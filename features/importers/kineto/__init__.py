"""Imports Chrome traces of torch.profiler (Kineto)."""

from ebbtide.features.importers.importer import Importer
from ebbtide.features.importers.kineto.importer import KinetoImporter

IMPORTERS: tuple[Importer, ...] = (KinetoImporter(),)
