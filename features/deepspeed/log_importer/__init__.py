"""Imports logs of DeepSpeed with wall clock breakdown."""

from ebbtide.features.deepspeed.log_importer.importer import DeepSpeedLogImporter
from ebbtide.features.importers.importer import Importer

IMPORTERS: tuple[Importer, ...] = (DeepSpeedLogImporter(),)
