"""Machines: the rates of a machine, its file, and the presets of ebbtide."""
