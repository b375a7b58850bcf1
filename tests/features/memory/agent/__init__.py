"""Tests of `ebbtide.features.memory.agent`."""
