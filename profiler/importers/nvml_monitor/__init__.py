"""Imports CSV files of GPU monitors: nvidia-smi and scripts that poll NVML."""
