"""Imports Chrome traces of torch.profiler (Kineto)."""

from ebbtide.profiler.importers.importer import Importer
from ebbtide.profiler.importers.kineto.importer import KinetoImporter

IMPORTERS: tuple[Importer, ...] = (KinetoImporter(),)
