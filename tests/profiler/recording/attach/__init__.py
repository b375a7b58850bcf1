"""Tests of `ebbtide.profiler.recording.attach`: details on demand."""
