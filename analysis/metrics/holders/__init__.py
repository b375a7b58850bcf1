"""Holders of device memory.

They say what holds it at a time, by category, module and call site, and what keeps
growing.
"""
