"""Arithmetic of the update.

It has the reference AdamW, kernels with the same bits, gradient norm, and loss scale.
"""
