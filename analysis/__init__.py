"""Explains a trace: iterations, summaries, windows of free memory, and plots."""
