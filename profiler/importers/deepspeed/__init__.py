"""Imports logs of DeepSpeed with wall clock breakdown."""

from ebbtide.profiler.importers.deepspeed.importer import DeepSpeedLogImporter
from ebbtide.profiler.importers.importer import Importer

IMPORTERS: tuple[Importer, ...] = (DeepSpeedLogImporter(),)
