"""Explains a trace: iterations, summaries and plots."""
