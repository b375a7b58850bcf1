"""A stand-in for the CUDA runtime, under the CUDA build of torch:
docs/cuda-runtime.md."""
