"""Imports logs of DeepSpeed with wall clock breakdown."""
