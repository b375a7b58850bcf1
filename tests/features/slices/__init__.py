"""Tests of `ebbtide.features.slices`."""
