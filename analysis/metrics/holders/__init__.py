"""Holders of device memory: what holds it at a time, by category, module and call site,
and what keeps growing."""
