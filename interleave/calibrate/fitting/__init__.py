"""Fits a machine's rates from traces."""
