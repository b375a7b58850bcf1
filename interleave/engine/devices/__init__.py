"""The device protocol, and its implementations for CUDA GPUs and for an emulated
device."""
