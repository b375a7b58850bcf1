"""Readers: one file for each kind of text."""
