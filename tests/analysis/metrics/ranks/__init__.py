"""Tests of ebbtide.analysis.metrics.ranks."""
