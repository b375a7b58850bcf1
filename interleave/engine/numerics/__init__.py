"""Arithmetic of the update: the reference AdamW, the kernels held to it, gradient norm, loss scale."""
