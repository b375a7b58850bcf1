"""Tests of ebbtide.profiler.memory_snapshot."""
