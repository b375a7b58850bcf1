"""Tests of `ebbtide.features.slices.attach`: details on demand."""
