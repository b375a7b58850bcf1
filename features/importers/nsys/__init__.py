"""Imports SQLite exports of Nsight Systems (`nsys export --type sqlite`)."""

from ebbtide.features.importers.importer import Importer
from ebbtide.features.importers.nsys.importer import NsysImporter

IMPORTERS: tuple[Importer, ...] = (NsysImporter(),)
