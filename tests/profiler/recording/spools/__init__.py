"""Tests of `ebbtide.profiler.recording.spools`."""
