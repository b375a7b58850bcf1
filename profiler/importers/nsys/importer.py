"""Imports SQLite exports and CSV reports of Nsight Systems."""

from __future__ import annotations

from collections.abc import Sequence

from ebbtide.profiler.importers.importer import ImportOptions, Recognition, Stage
from ebbtide.profiler.importers.nsys.csv_capture import read_reports
from ebbtide.profiler.importers.nsys.csv_reports import has_report
from ebbtide.profiler.importers.nsys.database import MAGIC, open_database
from ebbtide.profiler.importers.nsys.ranks import add_capture
from ebbtide.profiler.importers.nsys.sqlite_capture import EXPORT_TABLES, read_capture
from ebbtide.profiler.importers.source import Source, SourceError
from ebbtide.profiler.trace import TraceBuilder

# Recordings, before they are exported: their format is not public.
_RECORDINGS = (".nsys-rep", ".qdrep", ".qdstrm")


class NsysImporter:
    """Importer of the files that `nsys export --type sqlite` writes."""

    format = "nsys"
    recognition = Recognition.MAGIC_BYTES
    stage = Stage.PROFILE

    def matches(self, source: Source) -> bool:
        return source.head.startswith(MAGIC) or _is_recording(source)

    def import_into(self, builder: TraceBuilder, sources: Sequence[Source], options: ImportOptions) -> list[Source]:
        undated = []
        for source in sources:
            if not source.head.startswith(MAGIC):
                export = source.path.with_suffix(".sqlite")
                raise SourceError(
                    f"{source} is not an SQLite export: run `nsys export --type sqlite -o {export} {source}`, and "
                    f"import {export}"
                )
            with open_database(source) as database:
                if not any(table in database.tables for table in EXPORT_TABLES):
                    raise SourceError(f"{source} is an SQLite database, but not an export of Nsight Systems")
                capture = read_capture(database)
            if capture.work.empty and capture.ranges.empty:
                raise SourceError(
                    f"{source} has neither work of a GPU nor NVTX ranges (nsys profile --trace=cuda,nvtx)"
                )
            add_capture(builder, capture, source, options)
            if capture.session_ns is None:
                undated.append(source)
        return undated


def _is_recording(source: Source) -> bool:
    return source.path.suffix in _RECORDINGS


class NsysCsvImporter:
    """Importer of the files that `nsys stats --format csv` writes. All files of one import are of one recording."""

    format = "nsys-csv"
    recognition = Recognition.COLUMN_NAMES
    stage = Stage.PROFILE

    def matches(self, source: Source) -> bool:
        return has_report(source)

    def import_into(self, builder: TraceBuilder, sources: Sequence[Source], options: ImportOptions) -> list[Source]:
        add_capture(builder, read_reports(sources), sources[0], options)
        return list(sources)
