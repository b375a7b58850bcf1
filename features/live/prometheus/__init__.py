"""Serves the figures of a recording to Prometheus."""
