"""Arithmetic of the update: the reference AdamW, kernels with the same bits, gradient
norm, and loss scale."""
