"""Samples from outside of the job: GPU memory and link counters (NVML), and host
memory."""
