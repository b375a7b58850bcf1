"""Tests of ebbtide.features.memory.holders."""
