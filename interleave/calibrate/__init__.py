"""Measures the rates of a machine, or fits them from traces."""
