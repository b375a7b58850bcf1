"""Policies of other systems that move weights and activations of layers, as their
authors run them."""
