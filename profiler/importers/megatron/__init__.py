"""Imports logs of Megatron-LM: times of iterations, timers, memory."""

from ebbtide.profiler.importers.importer import Importer
from ebbtide.profiler.importers.megatron.importer import MegatronLogImporter

IMPORTERS: tuple[Importer, ...] = (MegatronLogImporter(),)
