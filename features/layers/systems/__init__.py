"""Policies of other systems that move weights and activations of layers.

They are as their authors run them.
"""
