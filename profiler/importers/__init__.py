"""Imports files of other tools into traces: one sub-package per source, behind one `Importer` protocol."""
