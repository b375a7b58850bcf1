"""The layers of a model.

Their activations are kept, recomputed or offloaded, and their weights are streamed.
"""
