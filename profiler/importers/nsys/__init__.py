"""Imports Nsight Systems: SQLite exports (`nsys export --type sqlite`) and CSV reports (`nsys stats`)."""

from ebbtide.profiler.importers.importer import Importer
from ebbtide.profiler.importers.nsys.importer import NsysCsvImporter, NsysImporter

IMPORTERS: tuple[Importer, ...] = (NsysImporter(), NsysCsvImporter())
