"""The lines to paste: configurations of DeepSpeed, calls of ebbtide, and those of other
systems."""
