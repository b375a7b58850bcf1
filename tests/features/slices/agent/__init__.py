"""Tests of `ebbtide.features.slices.agent`."""
