"""Prints results as text: tables, and lines around them."""
