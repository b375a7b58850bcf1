"""The device protocol, and its implementations for CUDA and for an emulated device."""
