"""Work of GPUs in Chrome traces of torch.profiler: kernels, copies and memsets, and the calls that launched them."""
