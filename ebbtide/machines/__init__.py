"""Machines: rates of a box, its file, and the presets that come with ebbtide."""
