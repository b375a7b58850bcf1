"""Imports SQLite exports of Nsight Systems (`nsys export --type sqlite`)."""

from ebbtide.profiler.importers.importer import Importer
from ebbtide.profiler.importers.nsys.importer import NsysImporter

IMPORTERS: tuple[Importer, ...] = (NsysImporter(),)
