"""Imports logs of Megatron-LM: times of iterations, timers, memory."""

from ebbtide.features.importers.importer import Importer
from ebbtide.features.importers.megatron.importer import MegatronLogImporter

IMPORTERS: tuple[Importer, ...] = (MegatronLogImporter(),)
