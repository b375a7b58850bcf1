"""Imports logs of reinforcement learning with the times of each part of a step."""

from ebbtide.features.importers.importer import Importer
from ebbtide.features.importers.timings.importer import TimingsImporter

IMPORTERS: tuple[Importer, ...] = (TimingsImporter(),)
