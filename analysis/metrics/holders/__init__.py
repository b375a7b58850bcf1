"""Holders of device memory at a time, by category, module and call site, and what keeps
growing."""
