"""Asks a running job that is recorded on demand for details of some iterations, and follows them in its spools."""

from ebbtide.profiler.attach.attached_slice import AttachedSlice, SliceOptions, attach
from ebbtide.profiler.attach.progress import ProcessProgress

__all__ = ["AttachedSlice", "ProcessProgress", "SliceOptions", "attach"]
