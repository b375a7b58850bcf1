"""The lines to paste: for DeepSpeed, for ebbtide, and for other systems."""
