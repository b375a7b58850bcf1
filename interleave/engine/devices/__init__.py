"""The device protocol, and its implementations.

They are for CUDA GPUs and for an emulated device.
"""
