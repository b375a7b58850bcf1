"""A replacement of libcuda.so.1 in C, so that tests run Triton's real launcher on machines without a GPU."""
