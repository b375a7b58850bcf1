"""The parameters of an optimizer.

Also their gradients, their state dicts, and whatever reads them while updates run.
"""
