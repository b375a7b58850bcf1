"""The parameters of an optimizer.

Their gradients, their state dicts, and whatever reads them while updates run.
"""
