"""A replacement of libnvidia-ml.so.1 in C, so that tests run the real pynvml on
machines without a GPU."""
