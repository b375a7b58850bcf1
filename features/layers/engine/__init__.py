"""The layers of a model: activations that are kept, recomputed or offloaded, and
weights that are streamed."""
