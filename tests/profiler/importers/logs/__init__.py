"""Tests of `ebbtide.profiler.importers.logs`."""
