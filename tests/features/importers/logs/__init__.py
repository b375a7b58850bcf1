"""Tests of `ebbtide.features.importers.logs`."""
