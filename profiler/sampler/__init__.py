"""Samples GPU memory, link counters (NVML) and host memory from outside the job."""
