"""Imports files of GPU monitors: nvidia-smi, dcgmi, and scripts that poll NVML."""

from ebbtide.profiler.importers.importer import Importer
from ebbtide.profiler.importers.nvml_monitor.importer import MonitorImporter

IMPORTERS: tuple[Importer, ...] = (MonitorImporter(),)
