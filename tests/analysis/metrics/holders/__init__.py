"""Tests of ebbtide.analysis.metrics.holders."""
