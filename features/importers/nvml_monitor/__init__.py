"""Imports files of GPU monitors: nvidia-smi, dcgmi, and scripts that poll NVML."""

from ebbtide.features.importers.importer import Importer
from ebbtide.features.importers.nvml_monitor.importer import MonitorImporter

IMPORTERS: tuple[Importer, ...] = (MonitorImporter(),)
