"""Tests of `ebbtide.profiler.recording`."""
