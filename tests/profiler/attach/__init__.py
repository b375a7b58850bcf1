"""Tests of `ebbtide.profiler.attach`: details on demand."""
