"""Makes a trace of a training job that is not run on a device: its CUDA tensors are fake."""
