"""Imports Chrome traces of torch.profiler (Kineto)."""
